"""Chapter 2: count the products of Newton–Schulz, and compare its time with that of a decomposition.

python scripts/02_newton_schulz.py --shape 256x64
python scripts/02_newton_schulz.py --svd
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch02 import puzzle as fewer_flops
from muonbook.jobs import run_job

TAKES = {"": ("shape", "device"), "--svd": ("threads", "device")}  # job -> its options


def shape_of(text):
    """Return (rows, columns) of text like 256x64."""
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and len(side) <= 4 and 0 < int(side) <= 4096 for side in sides):
        raise launch.UsageError(f"--shape {text}: write rows x columns, each from 1 to 4096, as in 256x64.")
    return int(sides[0]), int(sides[1])


def parse():
    parser = launch.parser(__doc__)
    parser.add_argument("--shape", default="256x64", help="of the matrix to count for (default: %(default)s)")
    parser.add_argument("--svd", action="store_true", help="compare the time with a singular value decomposition")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    parser.add_argument("--device", default="cpu", metavar=launch.choices(("cpu", "cuda")), help="where to run")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, fewer_flops.PUZZLE)) is not None:
        return code
    launch.chosen_job(arguments, TAKES)
    if arguments.svd:
        return run_job(arguments, "muonbook.ch02.experiments:against_svd", report="report_svd")
    shape = shape_of(arguments.shape)
    return run_job(arguments, "muonbook.ch02.experiments:count", (shape,), report="report_products")


if __name__ == "__main__":
    launch.command(main)
