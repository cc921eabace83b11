"""Chapter 15: where Muon's cost vanishes or grows: batch, grid, link; and what a step sends on four grids of 8 ranks.

python scripts/15_regimes.py --skew
"""

from distmuon import launch
from muonbook.baselines import TITLES
from muonbook.ch15 import puzzle as choose_grid
from muonbook.ch15 import regimes
from muonbook.puzzles import add_arguments, handle

SKEWED = ("zero1", "ddp", *regimes.MUON_LAYOUTS)


def print_skew():
    """Run the workload on four grids and print what every baseline sends: counted, and predicted."""
    rows = regimes.measure_skew(rounds=0)
    print(f"MB that a rank sends per step, mean over 8 ranks, {rows[0]['tokens']:,} tokens, by DP x TP ranks")
    print("".join(f"{row['dp']:>5} x {row['tp']}" for row in rows))
    for name in SKEWED:
        print("".join(f"{row[name]['sent_bytes'] / 1e6:9.2f}" for row in rows) + f"  {TITLES[name]}")
    print(f"Counted = predicted: {all(row[name]['equal_on_every_rank'] for row in rows for name in SKEWED)}.")


def parse():
    parser = launch.parser(__doc__)
    add_arguments(parser)
    parser.add_argument("--skew", action="store_true", help="count what a step sends on four grids of 8 ranks")
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, choose_grid.PUZZLE)) is not None:
        return code
    if not arguments.skew:
        raise launch.UsageError("choose one of --skew, --check and --hint.")
    print_skew()
    return 0


if __name__ == "__main__":
    launch.command(main)
