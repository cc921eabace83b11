"""Chapter 5: what each collective does to real tensors, what it sends, who is in which group, and how a hang looks.

python scripts/05_processes_and_collectives.py --show collectives --json out/05.json
python scripts/05_processes_and_collectives.py --show groups --dp 2 --tp 2
python scripts/05_processes_and_collectives.py --mistake skip --timeout 3
TORCH_DISTRIBUTED_DEBUG=DETAIL python scripts/05_processes_and_collectives.py --mistake shapes --timeout 3
torchrun --nproc-per-node 4 scripts/05_processes_and_collectives.py --show collectives
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch05.puzzle import PUZZLE
from muonbook.jobs import check_json, run_job

SHOWS = {  # what every rank runs, and with what
    "collectives": ("muonbook.ch05.experiments:collectives", (1_200_000,)),
    "groups": ("muonbook.ch05.experiments:groups", ()),
}
SEEN = (*launch.WORLD, "json")
MISTAKES, RANKS = ("skip", "shapes", "order"), 4  # with two ranks, gloo ends the process on `shapes`
TAKES = {  # job -> its options
    "--show collectives": SEEN,
    "--show groups": SEEN,
    "--mistake": ("dp", "tp", "timeout", "threads"),
}


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    shows, made = launch.choices(tuple(SHOWS)), launch.choices(MISTAKES)
    parser.add_argument("--show", metavar=shows, default="collectives", help="what to run (default: %(default)s)")
    parser.add_argument("--mistake", metavar=made, help="make this mistake instead; --timeout is for its group alone")
    parser.add_argument("--json", metavar="FILE", help="write what every rank saw here")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def check(arguments):
    """Raise UsageError where the arguments do not fit together."""
    show, mistake, world = arguments.show, arguments.mistake, arguments.dp * arguments.tp
    for option, name, known in (("--show", show, SHOWS), ("--mistake", mistake, MISTAKES)):
        if name is not None and name not in known:
            raise launch.UsageError(f"{option} {name} is unknown; choose one of {', '.join(known)}.")
    launch.chosen_job(arguments, TAKES, "--mistake" if mistake else f"--show {show}")
    if mistake and (world != RANKS or launch.under_torchrun()):
        raise launch.UsageError(f"--mistake {mistake} is made by {RANKS} ranks on gloo, without torchrun.")
    if mistake:
        launch.check_range(arguments, timeout=(0.1, 3600))
    if world == 1:
        raise launch.UsageError(f"--show {show}: one rank has no other to talk to; choose --dp 2 or more.")
    check_json(arguments)


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, PUZZLE)) is not None:
        return code
    check(arguments)
    if not arguments.mistake:
        return run_job(arguments, *SHOWS[arguments.show], arguments.show, arguments.json)
    made = (arguments.mistake, arguments.timeout)  # the timeout is for the mistake's own group
    options = launch.options(arguments) | {"timeout": launch.DEFAULT_TIMEOUT}
    said = launch.run("muonbook.ch05.experiments:make", made, **options)
    print("\n".join(f"rank {rank}: {words}" for rank, words in enumerate(said) if words is not None))
    return 0


if __name__ == "__main__":
    launch.command(main)
