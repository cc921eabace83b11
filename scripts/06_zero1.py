"""Chapter 6: ZeRO-1 AdamW. Train it, certify it and count its bytes; follow one bucket; or compare it with others.

python scripts/06_zero1.py --dp 4
python scripts/06_zero1.py --follow --json out/follow.json
python scripts/06_zero1.py --compare --json out/compare.json
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch06 import puzzle as sharded_step
from muonbook.jobs import check_json, run_job
from muonbook.recipe_arguments import add_arguments, recipe_of

TINY = 8  # elements of the bucket to follow
SEEN = (*launch.WORLD, "json")
TAKES = {"": (*launch.WORLD, "steps", "dtype"), "--follow": SEEN, "--compare": SEEN}  # job -> its options


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    job = parser.add_argument_group("the job").add_mutually_exclusive_group()
    job.add_argument("--follow", action="store_true", help=f"follow one bucket of {TINY} weights through a step")
    job.add_argument("--compare", action="store_true", help="count what DDP, ZeRO-1 and FSDP2 keep and send")
    parser.add_argument("--json", metavar="FILE", help="with --follow or --compare: write what every rank reported")
    training = parser.add_argument_group("the training, without --follow and --compare")
    add_arguments(training, "steps", "dtype", steps=20)
    puzzles.add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, sharded_step.PUZZLE)) is not None:
        return code
    launch.chosen_job(arguments, TAKES)
    launch.check_range(arguments, steps=(1, 10**7))
    if arguments.tp != 1:
        raise launch.UsageError(f"--tp {arguments.tp}: this chapter has DP ranks only; chapter 9 adds TP.")
    if (arguments.follow or arguments.compare) and arguments.dp == 1:
        raise launch.UsageError("--dp 1: one rank has nobody to share with; choose 2 or more.")
    if arguments.follow and TINY % max(arguments.dp, 1):
        raise launch.UsageError(f"--follow --dp {arguments.dp}: {TINY} weights are shared by 2, 4 or 8 ranks.")
    check_json(arguments)
    if arguments.follow:
        return run_job(arguments, "muonbook.ch06.trace_one_bucket:follow", (TINY,))
    recipe = recipe_of(arguments, optimizer="adamw").shared_by(arguments.dp).check(arguments.dp, arguments.tp)
    if arguments.compare:
        return run_job(arguments, "muonbook.ch06.data_parallel:compare", (recipe,), recipe)
    return run_job(arguments, "muonbook.ch06.training:train", (recipe,), recipe, arguments.dp, arguments.threads)


if __name__ == "__main__":
    launch.command(main)
