"""Plan a world: what its ranks hold, send and compute in a step of training, and how long that takes; starts nothing.

python scripts/plan.py --model moonlight --dp 32 --tp 2 --pp 2 --ep 8
python scripts/plan.py --model llama2_7b --dp 8 --optimizer adamw
python scripts/plan.py --model llama3_70b --ranks 512 --sequence-parallel
python scripts/plan.py --model kimi_k2 --dp 128 --tp 8 --pp 8 --ep 64 --optimizer muonw
python scripts/plan.py --model scripts/examples/my_model.toml --ranks 64 --json out/plan.json
python scripts/plan.py --model llama3_8b --dp 64 --tp 2 --tokens 4194304 --compare
python scripts/plan.py --measure --json book/results/planner.json

With --ranks alone it looks for the grids that fit. --compare sets every Muon beside AdamW, laid out alike on one grid.
Bytes are those of the layout code that training uses; seconds are an alpha-beta model's on an assumed fabric, one part
after the other. --measure times small worlds on this machine and holds that model against those that it has not seen:
about three minutes, on Linux with network namespaces.
"""

from distmuon import launch
from muonbook.jobs import check_measurement

GRID = ("dp", "tp", "pp", "ep")
WORLD = ("model", "ranks", *GRID, "tokens", "device", "fabric", "recompute", "sequence_parallel")
TAKES = {  # job -> its options
    "": (*WORLD, "optimizer", "strategy", "buckets", "json"),
    "--compare": (*WORLD, "json"),
    "--measure": ("quick", "json"),
}
MOST_RANKS, MOST_TOKENS = 1 << 20, 1 << 34


def parse():
    parser = launch.parser(__doc__)
    grid = parser.add_argument_group("the world: D x T x P ranks")
    grid.add_argument("--ranks", type=int, metavar="N", help="of the whole world; alone, it looks for grids that fit")
    grid.add_argument("--dp", type=int, metavar="D", help="data-parallel ranks (default: what --ranks leaves, or 8)")
    grid.add_argument("--tp", type=int, metavar="T", help="tensor-parallel ranks (default: 1)")
    grid.add_argument("--pp", type=int, metavar="P", help="pipeline stages, under 1F1B (default: 1)")
    grid.add_argument("--ep", type=int, metavar="E", help="of the D ranks, how many share out the experts (default: 1)")
    job = parser.add_argument_group("the training")
    add = job.add_argument
    add(
        "--model", default="moonlight", metavar="NAME", help="a published shape, or a .toml file (default: %(default)s)"
    )
    add("--optimizer", default="muon", metavar="NAME", help="adamw, muon or muonw (default: %(default)s)")
    words = "of muon: how it sees matrices, or a .py file with your own (default: %(default)s)"
    add("--strategy", default="owner", metavar="NAME", help=words)
    add("--buckets", default="ours", metavar="RULE", help="how long buckets are: ours, megatron, flat (default: ours)")
    add("--tokens", type=int, default=1 << 24, metavar="N", help="per step, of all ranks (default: %(default)s)")
    add("--recompute", action="store_true", help="keep a layer's input alone, and compute the rest again")
    add("--sequence-parallel", action="store_true", help="with --tp: cut the sequence where no matrix is cut")
    machine = parser.add_argument_group("the machine, as an assumption")
    machine.add_argument("--device", default="h100", metavar="NAME", help="a100, h100 or h200 (default: %(default)s)")
    machine.add_argument("--fabric", default="nvlink_infiniband", metavar="NAME", help="links (default: %(default)s)")
    parser.add_argument("--compare", action="store_true", help="every Muon's step over AdamW's, on one grid")
    parser.add_argument("--measure", action="store_true", help="time small worlds here, and write --json")
    parser.add_argument("--quick", action="store_true", help="with --measure: a few rounds of a few worlds")
    parser.add_argument("--json", metavar="FILE", help="write what was planned, or measured, here")
    return parser.parse_args()


def check(arguments):
    """Raise UsageError for whatever needs no model to be wrong."""
    launch.check_range(arguments, tokens=(1, MOST_TOKENS), **dict.fromkeys(("ranks", *GRID), (1, MOST_RANKS)))
    if arguments.optimizer != "muon" and "strategy" in arguments.given:
        raise launch.UsageError(
            f"--strategy does nothing with --optimizer {arguments.optimizer}; leave one of the two out."
        )
    if arguments.optimizer == "muonw" and "buckets" in arguments.given:
        raise launch.UsageError("--buckets does nothing with --optimizer muonw; leave one of the two out.")
    launch.check_writable("--json", arguments.json)


def measure(arguments):
    """Time small worlds, write and print what was found."""
    check_measurement(arguments, "--measure")
    from muonbook.measure import results
    from muonbook.planner.measured import worlds

    found = worlds.measure(arguments.quick)
    results.write(arguments.json, found)
    print("\n".join(worlds.lines(found)))


def main():
    arguments = parse()
    if (job := launch.chosen_job(arguments, TAKES)) == "--measure":
        measure(arguments)
        return 0
    check(arguments)
    from muonbook.planner import plan_page  # and with it torch

    (plan_page.compare if job else plan_page.plan)(arguments)
    return 0


if __name__ == "__main__":
    launch.command(main)
