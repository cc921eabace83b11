"""Chapter 12: count every byte of a training step, on one level of the machine after the other.

python scripts/12_bytes.py --dp 2 --tp 2
python scripts/12_bytes.py --ratios --dp 4
"""

from distmuon import launch
from muonbook import puzzles
from muonbook.ch12 import puzzle as count_once
from muonbook.jobs import run_job
from muonbook.measure.workload import SHAPES

GRID = ("dp", "tp", "shape")
TAKES = {  # job -> its options
    "": (*launch.WORLD, "shape"),
    "--ratios": GRID,
}


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=2, tp=2)
    job = parser.add_argument_group("the job (default: count one step of every baseline)")
    job.add_argument("--ratios", action="store_true", help="Muon over ZeRO-1 AdamW, by formula and counted")
    parser.add_argument("--shape", metavar=launch.choices(tuple(SHAPES)), default="even", help="model (default: even)")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def check(arguments):
    """Raise UsageError for what does not fit together."""
    job, dp, tp, shape = launch.chosen_job(arguments, TAKES), arguments.dp, arguments.tp, arguments.shape
    launch.check_known(arguments, shape=SHAPES)
    if job:
        launch.check_range(arguments, dp=(1, 256), tp=(1, 256))
    if dp >= 1:
        SHAPES[shape].shared_by(dp).check(dp, tp)
    if arguments.ratios and dp == 1:
        raise launch.UsageError("--ratios --dp 1: with one DP rank AdamW sends nothing; choose 2 or more.")
    if arguments.ratios and launch.under_torchrun():
        raise launch.UsageError("--ratios starts local worlds on gloo; run it without torchrun.")


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, count_once.PUZZLE)) is not None:
        return code
    check(arguments)
    dp, tp, shape = arguments.dp, arguments.tp, arguments.shape
    if not arguments.ratios:
        workloads = {shape: SHAPES[shape].shared_by(dp)}
        return run_job(arguments, "muonbook.ch12.four_counts:count", (workloads,), dp, tp, shape)
    from muonbook.ch12 import byte_counts

    return 0 if byte_counts.report_ratios(byte_counts.compared_on(dp, tp, shape)) else 1


if __name__ == "__main__":
    launch.command(main)
