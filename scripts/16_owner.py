"""Chapter 16: from the blueprint to one owner per matrix, rung by rung; and a trillion parameters, planned.

python scripts/16_owner.py --dp 4 --tp 2
python scripts/16_owner.py --trillion
"""

from distmuon import launch
from muonbook.ch16 import puzzle as dealing
from muonbook.puzzles import add_arguments, handle

CLIMB = "muonbook.ch16.ladder:climb"
HEADS = 8  # of the ladder's transformer, which TP shares out
TAKES = {"": launch.WORLD, "--trillion": ()}  # job -> its options


def climb(arguments):
    """Take one step on every rung, on a real grid, and print what it took; return the exit code."""
    counts = launch.run(CLIMB, **launch.options(arguments))[0]
    if not counts:
        return 0  # under torchrun, rank 0 alone goes on
    from muonbook.ch16 import ladder  # and with it torch

    print("\n".join(ladder.lines(counts)))
    return 0 if ladder.all_as_predicted(counts) else 1


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=2)
    parser.add_argument("--trillion", action="store_true", help="plan a trillion parameters on 1,024 x 8 ranks")
    add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, dealing.PUZZLE)) is not None:
        return code
    launch.chosen_job(arguments, TAKES)
    if arguments.trillion:
        from muonbook.ch16.trillion import lines  # and with it torch

        print("\n".join(lines()))
        return 0
    if arguments.tp >= 1 and HEADS % arguments.tp:
        raise launch.UsageError(f"--tp {arguments.tp} does not divide the model's {HEADS} heads; choose 1, 2, 4 or 8.")
    return climb(arguments)


if __name__ == "__main__":
    launch.command(main)
