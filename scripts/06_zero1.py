"""Chapter 6: ZeRO-1 AdamW. Train it, certify it and count its bytes, or compare it with others.

python scripts/06_zero1.py --dp 4
python scripts/06_zero1.py --compare --json out/compare.json
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch06 import puzzle as sharded_step
from muonbook.jobs import check_json, run_job
from muonbook.recipe_arguments import add_arguments, recipe_of

TAKES = {"": (*launch.WORLD, "steps", "dtype"), "--compare": (*launch.WORLD, "json")}  # job -> its options


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    job = parser.add_argument_group("the job")
    job.add_argument("--compare", action="store_true", help="count what DDP, ZeRO-1 and FSDP2 keep and send")
    parser.add_argument("--json", metavar="FILE", help="with --compare: write what every rank reported")
    training = parser.add_argument_group("the training, without --compare")
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
    if arguments.compare and arguments.dp == 1:
        raise launch.UsageError("--dp 1: one rank has nobody to share with; choose 2 or more.")
    check_json(arguments)
    recipe = recipe_of(arguments, optimizer="adamw").shared_by(arguments.dp).check(arguments.dp, arguments.tp)
    if arguments.compare:
        return run_job(arguments, "muonbook.ch06.experiments:compare", (recipe,), recipe, report="report_baselines")
    return run_job(arguments, "muonbook.ch06.experiments:train", (recipe,), recipe, arguments.dp, arguments.threads)


if __name__ == "__main__":
    launch.command(main)
