"""Chapter 8: Muon over data parallelism. Train it and certify it, follow one matrix, or compare ways to gather many.

python scripts/08_muon_over_dp.py --dp 4
python scripts/08_muon_over_dp.py --follow --json out/follow.json
python scripts/08_muon_over_dp.py --ways
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch08 import puzzle as gather_cut
from muonbook.jobs import check_json, run_job
from muonbook.recipe_arguments import add_arguments, recipe_of

TAKES = {  # job -> its options
    "": (*launch.WORLD, "steps", "dtype", "bucket_size"),
    "--follow": (*launch.WORLD, "json"),
    "--ways": launch.WORLD,
}


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    job = parser.add_argument_group("the job").add_mutually_exclusive_group()
    job.add_argument("--follow", action="store_true", help="follow one matrix of a small model")
    job.add_argument("--ways", action="store_true", help="gather 40 matrices in two ways, and count")
    parser.add_argument("--json", metavar="FILE", help="with --follow: write what every rank held and kept")
    training = parser.add_argument_group("the training, without --follow and --ways")
    add_arguments(training, "steps", "dtype", "bucket_size", steps=10, bucket_size=50_000)
    puzzles.add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, gather_cut.PUZZLE)) is not None:
        return code
    launch.chosen_job(arguments, TAKES)
    launch.check_range(arguments, steps=(1, 10**7), bucket_size=(1, 10**9))
    if arguments.tp != 1:
        raise launch.UsageError(f"--tp {arguments.tp}: this chapter has DP ranks only; chapter 9 adds TP.")
    if arguments.ways and arguments.dp == 1:
        raise launch.UsageError("--dp 1: one rank has nothing to gather; choose 2 or more.")
    check_json(arguments)
    if arguments.follow:
        return run_job(arguments, "muonbook.ch08.experiments:follow", report="report_follow")
    if arguments.ways:
        return run_job(arguments, "muonbook.ch08.experiments:gather", report="report_gather")
    recipe = recipe_of(arguments).shared_by(arguments.dp).check(arguments.dp, arguments.tp)
    judged_by = recipe, arguments.dp, arguments.threads
    return run_job(arguments, "muonbook.ch08.experiments:train", (recipe,), *judged_by, report="report_train")


if __name__ == "__main__":
    launch.command(main)
