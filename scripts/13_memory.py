"""Chapter 13: memory. Weigh what eight ways to train keep on a rank, and what one step of each takes besides.

python scripts/13_memory.py --dp 4
python scripts/13_memory.py --dp 2 --tp 2 --shape tall --dtype bfloat16 --json out/13.json
python scripts/13_memory.py --measure --json book/results/memory.json
"""

import os
from dataclasses import replace

from distmuon import launch
from distmuon.models.recipe import DTYPES
from muonbook import puzzles
from muonbook.ch13 import puzzle as step_in_waves
from muonbook.jobs import check_json, check_measurement, run_job
from muonbook.measure.workload import FILM, SHAPES
from muonbook.recipe_arguments import add_arguments

WEIGHED = {"film": FILM, **SHAPES}
TAKES = {"": (*launch.WORLD, "shape", "dtype", "json"), "--measure": ("quick", "json")}  # job -> its options


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    job = parser.add_argument_group("the job")
    job.add_argument("--shape", metavar=launch.choices(tuple(WEIGHED)), default="film", help="(default: film)")
    add_arguments(job, "dtype")
    job.add_argument("--measure", action="store_true", help="take all measurements of the chapter, on grids of its own")
    job.add_argument("--quick", action="store_true", help="with --measure: a few, for a first impression")
    job.add_argument("--json", metavar="FILE", help="write what was found here")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def checked(arguments):
    """Return the workload; raise launch.UsageError for arguments that do not fit."""
    launch.chosen_job(arguments, TAKES)
    launch.check_known(arguments, shape=WEIGHED, dtype=DTYPES)
    if arguments.measure:
        check_measurement(arguments, "--measure")
    check_json(arguments)
    workload = replace(WEIGHED[arguments.shape], dtype=arguments.dtype)
    return workload.shared_by(max(arguments.dp, 1)).check(arguments.dp, arguments.tp)


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, step_in_waves.PUZZLE)) is not None:
        return code
    workload = checked(arguments)
    if not arguments.measure:
        place = workload, arguments.dp, arguments.tp
        return run_job(arguments, "muonbook.ch13.memory_study:weigh_admitted", (workload,), *place)
    os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # before torch: its profiler talks
    from muonbook.ch13.memory_study import measure
    from muonbook.measure import results

    results.write(arguments.json, measure(arguments.quick))
    return 0


if __name__ == "__main__":
    launch.command(main)
