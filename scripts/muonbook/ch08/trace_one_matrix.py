"""One matrix on its way through the DP gather: what every rank held of it before and after, and whose it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distmuon.launch import World
from distmuon.optim.newton_schulz import newton_schulz
from distmuon.optim.options import MUON_DEFAULTS
from distmuon.optim.strategies.gather_all import GatherAll
from distmuon.optim.strategies.strategy import StrategyContext
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ParamSpec, plan
from muonbook.provenance import with_sources

SMALL = (ParamSpec("A", (3, 4), "float32"), ParamSpec("B", (4, 5), "float32"), ParamSpec("b", (3,), "float32"))
B = 1  # the matrix to follow


def follow(world: World) -> list[dict[str, Any]] | None:
    """Take one matrix through dp_gather, Newton–Schulz and dp_shard; return what every rank held, and whose it was."""
    grid = Grid.of(world)
    layout = plan(SMALL, grid.dp.size)
    metas, buckets = layout.view(grid.dp.rank), layout.buckets[:1]
    whole = torch.randint(-9, 10, SMALL[B].shape, generator=torch.Generator().manual_seed(8)).float().to(grid.device)
    mine = metas[B].range_in_param
    piece = whole.flatten()[mine.as_slice]
    options = MUON_DEFAULTS | dict(compute_dtype=torch.float32, batched=False)
    moves = GatherAll(StrategyContext(layout, metas, grid, {0: options, B: options}, None))

    def dp_gather(piece: Tensor) -> dict[int, Tensor]:
        return moves.dp_gather(buckets, {B: piece} if mine.size else {})

    gathered = dp_gather(piece)
    sent = grid.ledger.total().sent_bytes
    updates = moves.newton_schulz(moves.tp_gather(buckets, gathered))
    kept = moves.dp_shard(buckets, updates)
    alone = newton_schulz(whole.to(torch.bfloat16), compute_dtype=torch.float32)
    right = not mine.size or torch.equal(kept[B], alone.flatten()[mine.as_slice])

    after, sources = with_sources(lambda piece: dp_gather(piece).get(B), piece, grid.dp.rank, grid.dp.size)
    before = [x if mine.start <= i < mine.end else None for i, x in enumerate(whole.flatten().tolist())]
    columns = SMALL[B].shape[1]
    rows = [before[i : i + columns] for i in range(0, len(before), columns)] if mine.size else None
    count = [mine.size, *(sum(t.numel() for t in have.values()) for have in (gathered, updates, kept))]
    return world.gather({
        "before": rows, "after": after, "sources": sources, "count": count, "right": right, "sent": sent,
    })  # fmt: skip


def report(ranks: list[dict[str, Any]]) -> tuple[bool, list[dict[str, Any]]]:
    """Print who held how much of the matrix, and whether its update is right."""
    print("Elements of B    momentum   dp_gather   newton_schulz   dp_shard")
    for number, rank in enumerate(ranks):
        before, gathered, update, kept = rank["count"]
        print(f"  DP rank {number}{before:>14}{gathered:>12}{update:>16}{kept:>11}")
    right = all(rank["right"] for rank in ranks)
    print(f"Pieces kept are those of Newton–Schulz on the whole, bit for bit: {right}.")
    print(f"Sent by each rank: {ranks[0]['sent']} bytes, for the whole bucket.")
    return right, ranks
