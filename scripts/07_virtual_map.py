"""Chapter 7: every rank draws the same map by itself; matrices travel to their owners whole, and go back in pieces.

python scripts/07_virtual_map.py --dp 4 --bucket-size 64
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch07 import puzzle as fetch_matrix
from muonbook.jobs import run_job


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    parser.add_argument("--bucket-size", type=int, default=64, help="elements (default: %(default)s)")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, fetch_matrix.PUZZLE)) is not None:
        return code
    launch.check_range(arguments, bucket_size=(1, 10**9))
    if arguments.tp != 1:
        raise launch.UsageError(f"--tp {arguments.tp}: this chapter has DP ranks only; chapter 9 adds TP.")
    return run_job(arguments, "muonbook.ch07.experiments:work", (arguments.bucket_size,))


if __name__ == "__main__":
    launch.command(main)
