"""Chapter 18: a training on two machines that goes on whatever happens to them, drilled in many ways.

python scripts/18_beyond_one_machine.py
python scripts/18_beyond_one_machine.py --drill "out of memory"
python scripts/18_beyond_one_machine.py --drill all --json book/results/drills.json
python scripts/18_beyond_one_machine.py --soak --json book/results/soak.json
"""

import sys

from distmuon import launch
from muonbook import network_emulation
from muonbook.ch18 import puzzle as placing
from muonbook.jobs import check_measurement
from muonbook.puzzles import add_arguments, handle

TAKES = {
    "": (),
    "--drill": ("json",),
    "--soak": ("steps", "ranks", "kill_every", "json"),
}  # job -> its options


def report(arguments):
    """Let two machines train, and things happen to them."""
    obstacle = become_switch()
    from muonbook.ch18 import demo

    for line in demo.report(obstacle):
        print(line, flush=True)


def drill(arguments):
    """Play some drills, or all, and write the table."""
    apart = become_switch() is None
    from muonbook.ch18.drills import table
    from muonbook.measure import results

    names, rows = table.asked_for(arguments.drill), []
    for row in table.rows_of(names, apart):
        rows.append(row)
        print(table.told(row), flush=True)
    if arguments.json is not None:
        results.write(arguments.json, table.stored(rows))


def soak(arguments):
    """Train for long, killing a rank again and again; write what was found."""
    from muonbook.ch18 import soak
    from muonbook.measure import results

    found = soak.soak(soak.Soak(arguments.steps, arguments.ranks, arguments.kill_every))
    results.write(arguments.json, found)


def become_switch():
    """Let machines have networks of their own; return why they cannot, if so. Before torch is imported."""
    obstacle = network_emulation.why_unavailable()
    if obstacle is None:
        network_emulation.setup_bridge()
    return obstacle


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument("--drill", nargs="+", metavar="NAME", help="ways in which things go wrong, or all")
    parser.add_argument("--soak", action="store_true", help="train for long, killing a rank again and again")
    add = parser.add_argument
    add("--steps", type=int, default=2000, metavar="N", help="of --soak (default: %(default)s)")
    add("--ranks", type=int, default=8, metavar="N", help="of --soak (default: %(default)s)")
    add("--kill-every", type=int, default=100, metavar="N", help="of --soak: steps (default: %(default)s)")
    add("--json", metavar="FILE", help="with one of these: write what came of it here")
    add_arguments(parser)
    return parser.parse_args()


def check(arguments):
    """Raise UsageError for what cannot be."""
    launch.check_range(arguments, steps=(20, 1_000_000), ranks=(2, 64), kill_every=(10, 1_000_000))
    if arguments.soak and arguments.steps < 2 * arguments.kill_every:
        raise launch.UsageError(
            f"--steps {arguments.steps}: nobody would be killed with --kill-every {arguments.kill_every}; "
            f"choose at least {2 * arguments.kill_every}."
        )
    if launch.under_torchrun():
        raise launch.UsageError("this worker starts torchrun itself, on machines of its own; run it with python.")
    if sys.platform != "linux" and (arguments.drill or arguments.soak):
        raise launch.UsageError("drills and the soak look into Linux's /proc; run them there.")
    if arguments.soak:
        check_measurement(arguments, "--soak")
    launch.check_writable("--json", arguments.json)


def main():
    arguments = parse()
    if (code := handle(arguments, placing.PUZZLE)) is not None:
        return code
    job = launch.chosen_job(arguments, TAKES)
    check(arguments)
    return {"": report, "--drill": drill, "--soak": soak}[job](arguments)


if __name__ == "__main__":
    launch.command(main)
