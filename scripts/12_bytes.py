"""Chapter 12: count every byte of a training step, at one floor of the building after the other.

python scripts/12_bytes.py --dp 2 --tp 2
python scripts/12_bytes.py --ratios --dp 4
python scripts/12_bytes.py --hosts --dp 4
python scripts/12_bytes.py --measure --json book/results/bytes.json
"""

from distmuon import launch
from distmuon.launch import hosts
from muonbook.ch12 import byte_results
from muonbook.ch12 import puzzle as count_once
from muonbook.measure.workload import SHAPES
from muonbook.puzzles import add_arguments, handle


def report_counts(dp, tp, shape, ranks):
    """Print rank 0's counts, a line per contender and collective; return whether every rank's agree."""
    from muonbook.ch12.byte_counts import by_name
    from muonbook.measure.baselines import CONTENDERS

    print(f"{dp} DP x {tp} TP ranks, model {shape!r}:")
    print("payload of one step on rank 0, in bytes")
    print("predicted ledger dispatched recorded  collectives")
    for (_, name), step in ranks[0].items():
        print(CONTENDERS[name].title)
        called = by_name(step.dispatched.by_collective())
        kept = "-" if step.ledger is None else equal(step.ledger.differences(step.predicted), [])
        for op, (calls, size) in by_name(step.expected()).items():
            seen = equal(called[op], (calls, size)), equal(step.recorded[op], (calls, size))
            print(f"{size:>9,}{kept:>7}{seen[0]:>11}{seen[1]:>9}  {calls:>2} {op}")
    faults = [
        f"rank {n}, {which}: {fault}" for n, r in enumerate(ranks) for which, c in r.items() for fault in c.faults()
    ]
    print(*faults[:5], sep="\n", end="\n" * bool(faults))
    print("Every rank, contender and collective, calls and bytes:")
    print(f"all counts agree: {not faults}.")
    return not faults


def equal(found, expected):
    return "=" if found == expected else "differs"


def report_ratios(rows):
    """Print Muon / ZeRO-1 AdamW, by formula and counted; return whether they are the same for matrices."""
    print(f"{rows[0]['dp']} DP x {rows[0]['tp']} TP ranks, Muon / ZeRO-1 AdamW:")
    print("formula  matrices  whole model")
    for row in rows:
        print(f"{row['formula']:>7.3f}{row['matrices']:>10.3f}{row['whole']:>13.3f}  {row['dtypes']}")
    same = all(abs(row["formula"] - row["matrices"]) < 1e-12 for row in rows)
    print(f"For matrices, counted = formula: {same}.")
    return same


def report_wire(rows):
    """Print what the operating system counted, over what the ring formula says; return whether it is within 3 %."""
    from muonbook.ch12 import byte_tables
    from muonbook.measure.baselines import CONTENDERS

    print(f"{rows[0]['dp']} DP x {rows[0]['tp']} TP ranks, {byte_results.STEPS} steps:")
    print("what left the interfaces, without headers, over the ring formula of the collectives called")
    print("  sum   single ranks        formula")
    for row in rows:
        by_rank = f"{row['least_rank']:.3f} to {row['greatest_rank']:.3f}"
        print(f"{row['ratio']:.3f} {by_rank} {row['ring']:>14,}  {CONTENDERS[row['contender']].title}")
    predicted = [row for row in rows if CONTENDERS[row["contender"]].predict is not None]
    alone = [row for row in predicted if row["contender"] not in byte_tables.BROADCASTS]
    near = byte_tables.near(predicted, ["ratio"]) and byte_tables.near(alone, ["least_rank", "greatest_rank"])
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
        from muonbook.measure import results

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
