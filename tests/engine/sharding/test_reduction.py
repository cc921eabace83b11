"""A bucket's two collectives: the sum is taken in rank order, the shards come in rank order, and both are counted."""

from __future__ import annotations

import contextlib

import torch

from distmuon import launch
from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Traffic, ring_bytes
from distmuon.verify.memory_tracker import StorageTracker

RANKS, ITEM = 4, 4


def wrong(world: World) -> list[str]:
    """Return what is wrong on this rank, for shards of several lengths."""
    looks = {length: looked_at(Grid.of(world), length) for length in (7, 1, 0)}
    return [f"{what}, {length}" for length, look in looks.items() for what, right in look.items() if not right]


def looked_at(grid: Grid, length: int) -> dict[str, bool]:
    rank, whole = grid.dp.rank, RANKS * length * ITEM
    scales = 10.0 ** torch.arange(RANKS)[:, None]  # by which the order of a sum shows
    everybodys = torch.randn(RANKS, RANKS * length, generator=torch.Generator().manual_seed(1)) * scales
    wanted = everybodys[0].clone()
    for other in everybodys[1:]:
        wanted += other
    full, own = everybodys[rank].clone(), slice(rank * length, (rank + 1) * length)
    grid.ledger.clear()
    with StorageTracker() as tracker:
        grid.dp.reduce_scatter(full, full[own], "gradients")
    found = {
        "sum in rank order": torch.equal(full[own], wanted[own]),
        "bytes of the sum": grid.ledger.total() == Traffic(1, whole, ring_bytes("reduce_scatter", whole, RANKS)),
        "memory: one bucket more": tracker.peak == whole,
    }
    full[own] = everybodys[rank][own]
    found["the rest stays"] = torch.equal(full, everybodys[rank])
    for started in (False, True):
        grid.ledger.clear()
        gathered = torch.zeros(RANKS * length)
        gathered[own] = everybodys[0][own]
        with grid.dp.async_collectives() if started else contextlib.nullcontext() as pending:
            grid.dp.all_gather(gathered[own], "parameters", gathered)
        if pending is not None:
            pending.wait()
        found[f"shards in rank order, {started=}"] = torch.equal(gathered, everybodys[0])
        once = Traffic(1, whole, ring_bytes("all_gather", whole, RANKS))
        found[f"bytes of the shards, {started=}"] = grid.ledger.total() == once
    return found


def test_shards_are_summed_and_gathered_in_rank_order_and_counted() -> None:
    assert launch.run(wrong, dp=RANKS) == [[]] * RANKS
