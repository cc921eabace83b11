"""Chapter 15: where Muon's cost vanishes or grows: batch, grid, link; and what a step sends on four grids of 8 ranks.

python scripts/15_regimes.py --skew
python scripts/15_regimes.py --measure --json book/results/regimes.json
python scripts/15_regimes.py --measure --quick --json out/regimes.json
python scripts/15_regimes.py --worlds --json book/results/worlds.json

--measure takes about five minutes on two cores, and needs the machine to itself; --quick half a minute. The links
need network namespaces; where the machine does not permit them, that part is left out, with a message. --worlds plans
worlds of 16 to 4,096 ranks; nothing is measured, and no process is started.
"""

from distmuon import launch
from muonbook.ch15 import puzzle as choose_grid
from muonbook.ch15 import regimes
from muonbook.jobs import check_measurement
from muonbook.measure import results
from muonbook.puzzles import add_arguments, handle
from muonbook.ways import TITLES

TAKES = {"--skew": (), "--measure": ("quick", "json"), "--worlds": ("quick", "json")}  # job -> its options


SKEWED = ("zero1", "ddp", *regimes.ALGORITHMS)


def print_skew():
    """Run the workload on four grids and print what every variant sends: counted, and predicted."""
    rows = regimes.measure_skew(rounds=0)
    print(f"MB that a rank sends per step, mean over 8 ranks, {rows[0]['tokens']:,} tokens, by DP x TP ranks")
    print("".join(f"{row['dp']:>5} x {row['tp']}" for row in rows))
    for name in SKEWED:
        print("".join(f"{row[name]['sent_bytes'] / 1e6:9.2f}" for row in rows) + f"  {TITLES[name]}")
    print(f"Counted = predicted: {all(row[name]['equal_on_every_rank'] for row in rows for name in SKEWED)}.")


def plan(quick):
    """Return the survey of planned worlds."""
    from muonbook.ch15.survey import survey  # and with it torch

    return survey(quick)


def parse():
    parser = launch.parser(__doc__)
    add_arguments(parser)
    parser.add_argument("--skew", action="store_true", help="count what a step sends on four grids of 8 ranks")
    parser.add_argument("--measure", action="store_true", help="take this chapter's measurements, and write --json")
    parser.add_argument("--worlds", action="store_true", help="plan worlds too large to start, and write --json")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rates and worlds: a first impression")
    parser.add_argument("--json", metavar="FILE", help="write what was measured or planned here")
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, choose_grid.PUZZLE)) is not None:
        return code
    if arguments.measure + arguments.skew + arguments.worlds != 1:
        raise launch.UsageError("choose one of --skew, --measure, --worlds, --check and --hint.")
    job = launch.chosen_job(arguments, TAKES)
    if arguments.skew:
        print_skew()
        return 0
    check_measurement(arguments, job)
    found = plan(arguments.quick) if arguments.worlds else regimes.measure(arguments.quick)
    results.write(arguments.json, found)
    return 0


if __name__ == "__main__":
    launch.command(main)
