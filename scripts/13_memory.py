"""Chapter 13: memory. Weigh what eight ways to train keep on a rank, and what one step of each takes besides.

python scripts/13_memory.py --dp 4
python scripts/13_memory.py --dp 2 --tp 2 --shape tall --dtype bfloat16
"""

from dataclasses import replace

from distmuon import launch
from distmuon.models.recipe import DTYPES
from muonbook import puzzles
from muonbook.ch13 import puzzle as step_in_waves
from muonbook.jobs import run_job
from muonbook.measure.workload import FILM, SHAPES
from muonbook.recipe_arguments import add_arguments

WEIGHED = {"film": FILM, **SHAPES}


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    job = parser.add_argument_group("the job")
    job.add_argument("--shape", metavar=launch.choices(tuple(WEIGHED)), default="film", help="(default: film)")
    add_arguments(job, "dtype")
    puzzles.add_arguments(parser)
    return parser.parse_args()


def checked(arguments):
    """Return the workload; raise launch.UsageError for arguments that do not fit."""
    launch.check_known(arguments, shape=WEIGHED, dtype=DTYPES)
    workload = replace(WEIGHED[arguments.shape], dtype=arguments.dtype)
    return workload.shared_by(max(arguments.dp, 1)).check(arguments.dp, arguments.tp)


def main():
    arguments = parse()
    if (code := puzzles.handle(arguments, step_in_waves.PUZZLE)) is not None:
        return code
    workload = checked(arguments)
    place = workload, arguments.dp, arguments.tp
    return run_job(arguments, "muonbook.ch13.memory_study:weigh_admitted", (workload,), *place)


if __name__ == "__main__":
    launch.command(main)
