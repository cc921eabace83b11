"""Chapter 12: count every byte of a training step, in ways that know nothing of each other.

python scripts/12_bytes.py --dp 2 --tp 2
python scripts/12_bytes.py --ratios --dp 4
python scripts/12_bytes.py --hosts --dp 4
python scripts/12_bytes.py --measure --json book/results/bytes.json
"""

import os

from distmuon import hosts, launch
from distmuon.measured import byte_results
from distmuon.measured.workload import SHAPES
from distmuon.puzzles import add_arguments, count_once, handle

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on standard error


def report_counts(dp, tp, shape, ranks):
    """Print rank 0's counts, a line per contender and collective; return whether every rank's agree."""
    from distmuon.measured.byte_counts import by_name
    from distmuon.measured.contenders import CONTENDERS

    print(f"{dp} DP x {tp} TP ranks, model {shape!r}: payload of one step on rank 0, in bytes")
    print(f"{'':<22}{'':<12}{'calls':>6}{'predicted':>13}{'ledger':>13}{'dispatched':>13}{'recorded':>13}")
    for (_, name), step in ranks[0].items():
        title = CONTENDERS[name].title
        ledger, called = by_name(step.expected()), by_name(step.dispatched.by_collective())
        for op, (calls, size) in ledger.items():
            kept = f"{size:,}" if step.ledger is not None and not step.ledger.differences(step.predicted) else "-"
            recorded = step.recorded[op].payload_bytes
            print(f"{title:<22}{op:<12}{calls:>6}{size:>13,}{kept:>13}{called[op][1]:>13,}{recorded:>13,}")
            title = ""
    faults = [
        f"rank {n}, {which}: {fault}" for n, r in enumerate(ranks) for which, c in r.items() for fault in c.faults()
    ]
    print(*faults[:5], sep="\n", end="\n" * bool(faults))
    print(f"Every rank, contender and collective, calls and bytes, all counts agree: {not faults}.")
    return not faults


def report_ratios(rows):
    """Print Muon / ZeRO-1 AdamW, by formula and counted; return whether they are the same for matrices."""
    print(
        f"{rows[0]['dp']} DP x {rows[0]['tp']} TP ranks       Muon / ZeRO-1 AdamW:  formula   matrices    whole model"
    )
    for row in rows:
        print(f"{row['dtypes']:<44}{row['formula']:>11.3f}{row['matrices']:>11.3f}{row['whole']:>15.3f}")
    same = all(abs(row["formula"] - row["matrices"]) < 1e-12 for row in rows)
    print(f"For matrices, counted = formula: {same}.")
    return same


def report_wire(rows):
    """Print what the operating system counted, over what the counter in torch says; return whether it is within 3 %."""
    from distmuon.measured.contenders import CONTENDERS

    grid = f"{rows[0]['dp']} DP x {rows[0]['tp']} TP ranks, {byte_results.STEPS} steps"
    print(f"{grid:<26}{'ledger, all ranks':>24}{'wire / ledger':>15}  by rank")
    for row in rows:
        by_rank = f"{row['least_rank']:.3f} to {row['greatest_rank']:.3f}"
        print(f"{CONTENDERS[row['contender']].title:<26}{row['ledger']:>24,}{row['ratio']:>15.3f}  {by_rank}")
    predicted = [row for row in rows if CONTENDERS[row["contender"]].predict is not None]
    # a broadcast goes along a tree: only all ranks together send what the formula says
    off = [row["ratio"] for row in predicted]
    off += [
        row[key] for row in predicted if row["contender"] != "torch_zero" for key in ("least_rank", "greatest_rank")
    ]
    near = all(abs(ratio - 1) < byte_results.TOLERANCE for ratio in off)
    print(f"Within 3 %, for every contender that we can predict (a broadcast's ranks only in sum): {near}.")
    return near


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=2, tp=2)
    job = parser.add_argument_group(
        "the job (default: count one step of every contender)"
    ).add_mutually_exclusive_group()
    job.add_argument("--ratios", action="store_true", help="Muon over ZeRO-1 AdamW, by formula and counted")
    job.add_argument(
        "--hosts", action="store_true", help="let the operating system count; Linux, root or user namespaces"
    )
    job.add_argument("--measure", action="store_true", help="take all measurements of the chapter, on every grid")
    parser.add_argument("--shape", metavar=launch.choices(tuple(SHAPES)), default="even", help="model (default: even)")
    parser.add_argument("--quick", action="store_true", help="with --measure: a first impression, on few grids")
    parser.add_argument("--json", metavar="FILE", help="with --measure: write the results here")
    add_arguments(parser)
    return parser.parse_args()


def check(arguments):
    """Raise UsageError for what does not fit together."""
    dp, tp, shape = arguments.dp, arguments.tp, arguments.shape
    if shape not in SHAPES:
        raise launch.UsageError(f"--shape {shape} is unknown; choose one of {', '.join(SHAPES)}.")
    if dp >= 1:
        SHAPES[shape].shared_by(dp).check(dp, tp)
    if arguments.ratios and dp == 1:
        raise launch.UsageError("--ratios --dp 1: with one DP rank AdamW sends nothing; choose 2 or more.")
    if arguments.hosts and dp * tp == 1:
        raise launch.UsageError("--hosts: one rank has nobody to send to; choose more.")
    local = arguments.backend == "gloo" and not launch.under_torchrun()
    if (arguments.ratios or arguments.hosts or arguments.measure) and not local:
        raise launch.UsageError(
            "--ratios, --hosts and --measure start local worlds on gloo; drop torchrun and --backend."
        )
    if (arguments.quick or arguments.json) and not arguments.measure:
        raise launch.UsageError("--quick and --json go with --measure.")


def measure(arguments):
    launch.check_writable("--json", arguments.json)
    obstacle = hosts.obstacle()
    if obstacle is None:
        hosts.become_switch()
    else:
        print(obstacle)
    found = byte_results.measure(arguments.quick, obstacle)
    print(*found["counted"]["faults"], sep="\n", end="\n" * bool(found["counted"]["faults"]))
    print(f"{len(found['counted']['grids'])} grids, every rank, all counts agree: {found['counted']['equal']}.")
    if arguments.json:
        from distmuon.measured import results

        results.write(arguments.json, found)
    return 0 if found["counted"]["equal"] else 1


def main():
    arguments = parse()
    if (code := handle(arguments, count_once.PUZZLE)) is not None:
        return code
    check(arguments)
    if arguments.measure:
        return measure(arguments)
    dp, tp, shape = arguments.dp, arguments.tp, arguments.shape
    if arguments.ratios:
        well = report_ratios(byte_results.ratios_on(dp, tp, shape))
    elif arguments.hosts:
        hosts.become_switch()
        well = report_wire(byte_results.wire_on(dp, tp, shape))
    else:
        workloads = {shape: SHAPES[shape].shared_by(dp)}
        ranks = launch.run(byte_results.on_rank_count, (workloads,), **launch.options(arguments))[0]
        well = ranks is None or report_counts(dp, tp, shape, ranks)
    return 0 if well else 1


if __name__ == "__main__":
    launch.command(main)
