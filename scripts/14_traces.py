"""Chapter 14: record a DP x TP training step of AdamW and of Muon, and race three schedules of Muon's step.

python scripts/14_traces.py --dp 2 --tp 2 --traces out
python scripts/14_traces.py --schedules --dp 2 --tp 2
python scripts/14_traces.py --hiding --dp 2 --tp 2
"""

from dataclasses import replace
from pathlib import Path

from distmuon import launch
from muonbook.ch14 import puzzle as look_ahead
from muonbook.jobs import run_job
from muonbook.measure.workload import SHAPES
from muonbook.puzzles import add_arguments, handle

SMALL = replace(SHAPES["even"], bucket_size=20_011)  # more bucket groups
TAKES = {  # job -> its options
    "": launch.WORLD,
    "--traces": launch.WORLD,
    "--schedules": launch.WORLD,
    "--hiding": launch.WORLD,
}


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=2, tp=2)
    job = parser.add_argument_group("the job").add_mutually_exclusive_group()
    job.add_argument("--traces", metavar="FOLDER", help="write each recorded step's trace into this folder")
    job.add_argument("--schedules", action="store_true", help="compare what three schedules of a step do")
    job.add_argument("--hiding", action="store_true", help="train with gradients and parameters hidden under passes")
    add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, look_ahead.PUZZLE)) is not None:
        return code
    launch.chosen_job(arguments, TAKES)
    if launch.is_main_process():
        for name in ("adamw", "muon") if arguments.traces else ():
            launch.check_writable("--traces", str(Path(arguments.traces) / f"step_{name}.json.gz"))
    if arguments.dp * arguments.tp == 1:
        raise launch.UsageError("--dp 1 --tp 1: one rank sends nothing; choose 2 or more.")
    SHAPES["even"].shared_by(arguments.dp).check(arguments.dp, arguments.tp)
    if arguments.schedules:
        return run_job(arguments, "muonbook.ch14.experiments:compare_schedules", (SMALL,), report="report_schedules")
    if arguments.hiding:
        return run_job(arguments, "muonbook.ch14.experiments:compare_hiding", (SMALL,), report="report_hiding")
    return run_job(arguments, "muonbook.ch14.experiments:record_steps", (), arguments.traces, report="report_steps")


if __name__ == "__main__":
    launch.command(main)
