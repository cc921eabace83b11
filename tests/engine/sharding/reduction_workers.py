"""Shards reduced by ranks that add up themselves, and gathered, at once and started."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Traffic
from distmuon.verify.memory_tracker import StorageTracker

RANKS, ITEM = 4, 4
LENGTHS = (7, 1, 0)  # of a shard


class Found(NamedTuple):
    sum_right: bool  # in rank order, to the bit
    rest_stayed: bool
    alive: int  # bytes at the worst moment of the reduction
    reduced: Traffic
    gathered: list[bool]  # at once, started
    collected: Traffic


def work(world: World) -> dict[int, Found]:
    """Return what every length of shards came to on this rank."""
    grid = Grid.of(world)
    return {length: _case(grid, length) for length in LENGTHS}


def _case(grid: Grid, length: int) -> Found:
    rank = grid.dp.rank
    generator = torch.Generator().manual_seed(1)
    everybodys = torch.randn(RANKS, RANKS * length, generator=generator) * 10.0 ** torch.arange(4)[:, None]
    wanted = everybodys[0].clone()
    for other in everybodys[1:]:
        wanted += other
    full = everybodys[rank].clone()
    own = slice(rank * length, (rank + 1) * length)
    grid.ledger.clear()
    with StorageTracker() as tracker:
        grid.dp.reduce_scatter(full, full[own], "gradients")
    mine, reduced = full[own].clone(), grid.ledger.total()
    full[own] = everybodys[rank][own]
    grid.ledger.clear()
    gathered = [_gathers(grid, everybodys[0], length, started) for started in (False, True)]
    return Found(
        torch.equal(mine, wanted[own]),
        torch.equal(full, everybodys[rank]),
        tracker.peak,
        reduced,
        gathered,
        grid.ledger.total(),
    )


def _gathers(grid: Grid, wanted: torch.Tensor, length: int, started: bool) -> bool:
    whole = torch.zeros(RANKS * length)
    shard = whole[grid.dp.rank * length : (grid.dp.rank + 1) * length]
    shard.copy_(wanted[grid.dp.rank * length : (grid.dp.rank + 1) * length])
    with grid.dp.async_collectives() if started else contextlib.nullcontext() as pending:
        grid.dp.all_gather(shard, "parameters", whole)
    if pending is not None:
        pending.wait()
    return torch.equal(whole, wanted)
