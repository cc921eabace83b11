"""Chapter 16: from the published layout to one owner per matrix, in five ways, counted.

python scripts/16_owner.py --dp 4 --tp 2
"""

from distmuon import launch
from muonbook.ch16 import puzzle as dealing
from muonbook.jobs import run_job
from muonbook.puzzles import add_arguments, handle

HEADS = 8  # of the transformer, which TP divides


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=2)
    add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, dealing.PUZZLE)) is not None:
        return code
    if arguments.tp >= 1 and HEADS % arguments.tp:
        raise launch.UsageError(f"--tp {arguments.tp} does not divide the model's {HEADS} heads; choose 1, 2, 4 or 8.")
    return run_job(arguments, "muonbook.ch16.experiments:take_steps")


if __name__ == "__main__":
    launch.command(main)
