"""Chapter 12: count every byte of a training step, on one level of the machine after the other.

python scripts/12_bytes.py --dp 2 --tp 2
python scripts/12_bytes.py --ratios --dp 4
python scripts/12_bytes.py --measure --json book/results/bytes.json
"""

from distmuon import launch
from muonbook import network_emulation, puzzles
from muonbook.ch12 import puzzle as count_once
from muonbook.jobs import check_measurement, run_job
from muonbook.measure.workload import SHAPES

GRID = ("dp", "tp", "shape")
TAKES = {  # job -> its options
    "": (*launch.WORLD, "shape"),
    "--ratios": GRID,
    "--measure": ("quick", "json"),
}


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=2, tp=2)
    group = parser.add_argument_group("the job (default: count one step of every contender)")
    job = group.add_mutually_exclusive_group()
    job.add_argument("--ratios", action="store_true", help="Muon over ZeRO-1 AdamW, by formula and counted")
    job.add_argument("--measure", action="store_true", help="take all measurements of the chapter, on every grid")
    parser.add_argument("--shape", metavar=launch.choices(tuple(SHAPES)), default="even", help="model (default: even)")
    parser.add_argument("--quick", action="store_true", help="with --measure: a first impression, on few grids")
    parser.add_argument("--json", metavar="FILE", help="with --measure: write the results here")
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


def measure(arguments):
    """Take all measurements of the chapter, and write them; return whether all counts agree."""
    check_measurement(arguments, "--measure")
    obstacle = network_emulation.why_unavailable()
    if obstacle is None:
        network_emulation.setup_bridge()
    else:
        print(obstacle)
    from muonbook.ch12 import byte_counts
    from muonbook.measure import results

    found = byte_counts.measure(arguments.quick, obstacle)
    counted = found["counted"]
    print(*counted["faults"], sep="\n", end="\n" * bool(counted["faults"]))
    print(f"{len(counted['grids'])} grids, every rank, all counts agree: {counted['equal']}.")
    results.write(arguments.json, found)
    return counted["equal"]


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, count_once.PUZZLE)) is not None:
        return code
    check(arguments)
    dp, tp, shape = arguments.dp, arguments.tp, arguments.shape
    if arguments.measure:
        return 0 if measure(arguments) else 1
    if not arguments.ratios:
        workloads = {shape: SHAPES[shape].shared_by(dp)}
        return run_job(arguments, "muonbook.ch12.four_counts:count", (workloads,), dp, tp, shape)
    from muonbook.ch12 import byte_counts

    return 0 if byte_counts.report_ratios(byte_counts.algorithms_on(dp, tp, shape)) else 1


if __name__ == "__main__":
    launch.command(main)
