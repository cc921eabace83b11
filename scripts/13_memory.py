"""Chapter 13: memory. Weigh what six ways to train keep on a rank, and what one step of each takes besides.

python scripts/13_memory.py --dp 4 --dtype bfloat16
python scripts/13_memory.py --dp 2 --tp 4 --shape odd --json out/13.json
python scripts/13_memory.py --measure --json book/results/memory.json
"""

from dataclasses import replace

from distmuon import launch
from distmuon.models.recipe import DTYPES
from muonbook.ch13 import puzzle as step_in_waves
from muonbook.ch13.memory_study import admitted, measure, numbers_compared, row_of, weigh_all
from muonbook.measure.workload import SHAPES
from muonbook.puzzles import add_arguments, handle

# ---- One grid ---------------------------------------------------------------------------------------------


def report(names, ranks, workload, dp, tp):
    """Print what rank 0 keeps, per kind and contender; return the rows, and whether all was as predicted."""
    from distmuon.verify.model_states import STATE
    from muonbook.measure.baselines import CONTENDERS

    rows = [row_of(name, [rank[number] for rank in ranks]) for number, name in enumerate(names)]
    print(f"Bytes that rank 0 of {dp} DP x {tp} TP keeps, {workload.dtype}\n")
    print(f"{'':<23}{'parameters':>11}{'gradients':>11}{'masters':>10}{'state':>11}{'all':>12}")
    for row in rows:
        state = sum(row["kept"][kind] for kind in STATE)
        columns = [row["kept"][kind] for kind in ("parameters", "gradients", "masters")]
        parts = "".join(f"{value:>{w},}" for value, w in zip([*columns, state], (11, 11, 10, 11), strict=True))
        print(f"{CONTENDERS[row['contender']].title:<23}{parts}{sum(row['kept'].values()):>12,}")
    numbers = numbers_compared(ranks)
    well = numbers["equal"] == numbers["compared"]
    print(f"\nEvery rank, contender and kind, counted = predicted to the byte: {well}")
    print(f"({numbers['compared']} numbers, {numbers['nonzero']} of them not 0).")
    held = all(row["under_bound"] is not False for row in rows)
    print(f"Every update whose worst moment has a predicted bound stayed under it: {held}.")
    return rows, well and held


# ---- The command ------------------------------------------------------------------------------------------


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    job = parser.add_argument_group("the job")
    job.add_argument("--shape", metavar=launch.choices(tuple(SHAPES)), default="even", help="(default: even)")
    job.add_argument(
        "--dtype", metavar=launch.choices(DTYPES), default="float32", help="of the model (default: float32)"
    )
    job.add_argument("--measure", action="store_true", help="take all measurements of the chapter, on grids of its own")
    job.add_argument("--quick", action="store_true", help="with --measure: a few, for a first impression")
    job.add_argument("--json", metavar="FILE", help="write what was found here")
    add_arguments(parser)
    return parser.parse_args()


def checked(arguments):
    """Return the workload; raise launch.UsageError for arguments that do not fit."""
    for option, value, known in (("shape", arguments.shape, tuple(SHAPES)), ("dtype", arguments.dtype, DTYPES)):
        if value not in known:
            raise launch.UsageError(f"--{option} {value}: choose one of {', '.join(known)}.")
    if arguments.measure and not arguments.json:
        raise launch.UsageError("--measure writes a file; add --json FILE.")
    if arguments.quick and not arguments.measure:
        raise launch.UsageError("--quick goes with --measure; add it, or leave --quick out.")
    if launch.speaks():
        launch.check_writable("--json", arguments.json)
    workload = replace(SHAPES[arguments.shape], dtype=arguments.dtype)
    return workload.shared_by(max(arguments.dp, 1)).check(arguments.dp, arguments.tp)


def main():
    arguments = parse()
    if (code := handle(arguments, step_in_waves.PUZZLE)) is not None:
        return code
    workload = checked(arguments)
    if arguments.measure:
        from muonbook.measure import results

        results.write(arguments.json, measure(arguments.quick))
        return 0
    names = admitted(workload, arguments.dp, arguments.tp)
    jobs = [(name, workload, True) for name in names]
    ranks = launch.run(weigh_all, (jobs,), **launch.options(arguments))[0]
    if ranks is None:
        return 0  # under torchrun, rank 0 alone goes on
    rows, well = report(names, ranks, workload, arguments.dp, arguments.tp)
    if arguments.json:
        from muonbook.report import write_json

        write_json(arguments.json, {"rows": rows})
    return 0 if well else 1


if __name__ == "__main__":
    launch.command(main)
