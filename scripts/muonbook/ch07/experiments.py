"""Every rank draws the same map by itself; matrices travel to their owners whole, and go back in pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distmuon.launch import World
from distmuon.optim.strategies.gather_all import GatherAll
from distmuon.optim.strategies.strategy import StrategyContext
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Layout, ParamSpec, plan

MODEL = (  # small enough to check by hand
    ParamSpec("W1", (8, 6), "float32"),
    ParamSpec("b1", (8,), "float32"),
    ParamSpec("W2", (6, 8), "float32"),
    ParamSpec("b2", (6,), "float32"),
)
MATRICES = [index for index, spec in enumerate(MODEL) if len(spec.shape) == 2]


def work(world: World, bucket_size: int) -> list[dict[str, Any]] | None:
    """Plan, gather the matrices of which this rank owns a piece, and cut them up again."""
    grid = Grid.of(world)
    layout = plan(MODEL, grid.dp.size, bucket_size)  # no rank asks another: same input, same map
    metas = layout.view(grid.dp.rank)
    whole = {i: torch.arange(MODEL[i].numel, device=grid.device) + 100.0 * (i + 1) for i in MATRICES}
    pieces = {i: whole[i][metas[i].range_in_param.as_slice] for i in MATRICES if metas[i].owned}

    groups: dict[int, dict[str, Any]] = {i: {} for i in MATRICES}
    strategy = GatherAll(StrategyContext(layout, metas, grid, groups, torch.float32))
    gathered: dict[int, Tensor] = {}
    returned: dict[int, Tensor] = {}
    for buckets in strategy.bucket_groups():
        here = {i: piece for i, piece in pieces.items() if i in buckets[0].params}
        blocks = strategy.dp_gather(buckets, here)
        gathered |= blocks
        returned |= strategy.dp_shard(buckets, blocks)

    evidence = {
        "layout": layout,
        "holds": [MODEL[index].name for index in gathered],
        "right": all(torch.equal(gathered[i], whole[i].view(MODEL[i].shape)) for i in gathered),
        "back": all(torch.equal(returned[i], pieces[i]) for i in MATRICES if metas[i].owned),
        "sent": grid.ledger.total(),
    }
    return world.gather(evidence)


def report(ranks: list[dict[str, Any]]) -> tuple[bool, None]:
    """Print what every rank owned and gathered, and whether all of it was right."""
    for number, rank in enumerate(ranks):
        print(f"DP rank {number} owns   {owned_runs(rank['layout'], number)}")
        print(f"          gathers {' and '.join(rank['holds']) or 'nothing to keep'}")
    same = all(rank["layout"] == ranks[0]["layout"] for rank in ranks)
    right, back = (all(rank[what] for rank in ranks) for what in ("right", "back"))
    print(f"Every rank drew the same map, and no message was sent for it: {same}.")
    print(f"dp_gather made every gathered matrix whole and right: {right}.")
    print(f"dp_shard gave every rank its own pieces back, bit for bit: {back}.")
    print(f"Each rank sent {ranks[0]['sent'].sent_bytes:,} bytes (all-gathers: {ranks[0]['sent'].calls}).")
    return same and right and back, None


def owned_runs(layout: Layout, dp_rank: int) -> str:
    """Return what a DP rank owns, in words: `W1[26:48] b1[0:4]`."""
    runs = []
    for spec, meta in zip(layout.specs, layout.view(dp_rank), strict=True):
        if meta.owned:
            runs.append(f"{spec.name}[{meta.range_in_param.start}:{meta.range_in_param.end}]")
    return " ".join(runs) or "padding only"
