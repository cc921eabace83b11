"""Chapter 7: every rank draws the same map by itself; matrices travel to their owners whole, and go back in pieces.

python scripts/07_virtual_map.py --dp 4 --bucket-size 64
"""

from distmuon import launch
from distmuon.sharding.layout import ParamSpec, plan
from muonbook.ch07 import puzzle as fetch_matrix
from muonbook.puzzles import add_arguments, handle

MODEL = (  # small enough to check by hand
    ParamSpec("W1", (8, 6), "float32"),
    ParamSpec("b1", (8,), "float32"),
    ParamSpec("W2", (6, 8), "float32"),
    ParamSpec("b2", (6,), "float32"),
)
MATRICES = [index for index, spec in enumerate(MODEL) if len(spec.shape) == 2]


def work(world, bucket_size):
    """Run on every rank: plan, gather the matrices of which this rank owns a piece, and cut them up again."""
    import torch

    from distmuon.optim.strategies.gather_all import GatherAll
    from distmuon.optim.strategies.strategy import Task
    from distmuon.sharding.grid import Grid

    grid = Grid.of(world)
    layout = plan(MODEL, grid.dp.size, bucket_size)  # no rank asks another: same input, same map
    metas = layout.view(grid.dp.rank)
    whole = {index: torch.arange(MODEL[index].numel) + 100.0 * (index + 1) for index in MATRICES}
    pieces = {i: whole[i][metas[i].range_in_param.as_slice] for i in MATRICES if metas[i].owned}

    strategy = GatherAll(Task(layout, metas, grid, {i: {} for i in MATRICES}, torch.float32, "auto", batched=False))
    gathered: dict[int, torch.Tensor] = {}
    returned: dict[int, torch.Tensor] = {}
    for wave in strategy.waves():
        here = {i: piece for i, piece in pieces.items() if i in wave[0].params}
        blocks = strategy.dp_gather(wave, here)
        gathered |= blocks
        returned |= strategy.dp_shard(wave, blocks)

    evidence = {
        "layout": layout,
        "holds": [MODEL[index].name for index in gathered],
        "right": all(torch.equal(gathered[i], whole[i].view(MODEL[i].shape)) for i in gathered),
        "back": all(torch.equal(returned[i], pieces[i]) for i in MATRICES if metas[i].owned),
        "sent": grid.ledger.total(),
    }
    return world.gather(evidence)


def owned_runs(layout, dp_rank):
    """Return what a DP rank owns, in words: `W1[26:48] b1[0:4]`."""
    runs = []
    for spec, meta in zip(layout.specs, layout.view(dp_rank), strict=True):
        if meta.owned:
            runs.append(f"{spec.name}[{meta.range_in_param.start}:{meta.range_in_param.end}]")
    return " ".join(runs) or "padding only"


def parse():
    parser = launch.parser(__doc__)
    launch.add_arguments(parser, dp=4, tp=1)
    parser.add_argument("--bucket-size", type=int, default=64, help="elements (default: %(default)s)")
    add_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if (code := handle(arguments, fetch_matrix.PUZZLE)) is not None:
        return code
    if arguments.bucket_size < 1:
        raise launch.UsageError(f"--bucket-size {arguments.bucket_size}: a bucket holds at least 1 element.")
    ranks = launch.run(work, (arguments.bucket_size,), **launch.options(arguments))[0]
    if not launch.speaks():
        return 0  # under torchrun, rank 0 alone goes on
    for number, rank in enumerate(ranks):
        print(f"DP rank {number} owns   {owned_runs(rank['layout'], number)}")
        print(f"          gathers {' and '.join(rank['holds']) or 'nothing to keep'}")
    same = all(rank["layout"] == ranks[0]["layout"] for rank in ranks)
    right, back = (all(rank[what] for rank in ranks) for what in ("right", "back"))
    print(f"Every rank drew the same map, and no message was sent for it: {same}.")
    print(f"dp_gather made every gathered matrix whole and right: {right}.")
    print(f"dp_shard gave every rank its own pieces back, bit for bit: {back}.")
    print(f"Each rank sent {ranks[0]['sent'].sent_bytes:,} bytes (all-gathers: {ranks[0]['sent'].calls}).")
    return 0 if same and right and back else 1


if __name__ == "__main__":
    launch.command(main)
