"""Chapter 9: Muon over tensor parallelism. Train it and certify it, or look at small layers and gathers.

python scripts/09_tensor_parallel.py --tp 2
python scripts/09_tensor_parallel.py --small --tp 2 --json out/small.json
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch09 import puzzle as column_gram
from muonbook.jobs import check_json, run_job
from muonbook.recipe_arguments import add_arguments, recipe_of

TAKES = {"": (*launch.WORLD, "steps", "dtype"), "--small": (*launch.WORLD, "json")}  # job -> its options


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=1, tp=2)
    parser.add_argument("--small", action="store_true", help="a pair of layers and three gathers, in whole numbers")
    parser.add_argument("--json", metavar="FILE", help="with --small: write what every rank held")
    training = parser.add_argument_group("the training, without --small")
    add_arguments(training, "steps", "dtype", steps=10)
    puzzles.add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, column_gram.PUZZLE)) is not None:
        return code
    launch.chosen_job(arguments, TAKES)
    launch.check_range(arguments, steps=(1, 10**7))
    if arguments.dp != 1:
        raise launch.UsageError(f"--dp {arguments.dp}: this chapter has TP ranks only; chapter 10 has both.")
    if arguments.small and arguments.tp not in (2, 4):
        raise launch.UsageError(f"--tp {arguments.tp}: these small matrices are cut in 2 or 4; choose one of them.")
    check_json(arguments)
    recipe = recipe_of(arguments).check(1, arguments.tp)
    if arguments.small:
        return run_job(arguments, "muonbook.ch09.small_layers:run")
    return run_job(arguments, "muonbook.ch09.experiments:train", (recipe,), recipe, arguments.tp, arguments.threads)


if __name__ == "__main__":
    launch.command(main)
