"""Shards of equal and of unequal length: reduced, at once and in pieces, by ranks that add up themselves; gathered."""

from __future__ import annotations

from typing import NamedTuple

import torch

from distmuon.launch import World
from distmuon.sharding import collectives
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Traffic
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.memory_tracker import StorageTracker

RANKS, ITEM = 4, 4
LENGTHS = {"equal": (7, 7, 7, 7), "unequal": (5, 0, 9, 2), "nothing": (0, 0, 0, 0)}
AT_ONCE = (1, 4, 12, 32, 1000)  # elements received at a time, over all ranks
Case = tuple[str, int]
Way = tuple[str, bool, bool]  # whose lengths; by way of the host's memory; started, and waited for later


class Reduced(NamedTuple):
    right: bool  # the sum in rank order, to the bit
    rest_stayed: bool
    alive: int  # bytes at the worst moment
    bound: int  # bytes
    traffic: Traffic


class Gathered(NamedTuple):
    whole: list[float]
    wanted: list[float]
    traffic: Traffic
    dispatched: Traffic


def work(world: World) -> tuple[dict[Case, Reduced], dict[Way, Gathered]]:
    """Return what every case of both came to on this rank."""
    return reduce_all(world), gather_all(world)


def gather_all(world: World) -> dict[Way, Gathered]:
    """Gather every rank's shard, as a GPU's tensors travel over gloo, too: a CPU's may take the same way."""
    grid, found = Grid.of(world), {}
    kept = collectives.is_gpu_over_gloo
    for name in LENGTHS:
        for via_host in (False, True):
            collectives.is_gpu_over_gloo = lambda *_, answer=via_host: answer
            for started in (False, True):
                found[name, via_host, started] = _gather(grid, LENGTHS[name], started)
    collectives.is_gpu_over_gloo = kept
    return found


def _gather(grid: Grid, lengths: tuple[int, ...], started: bool) -> Gathered:
    wanted = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(2))
    whole, rank = torch.zeros(sum(lengths)), grid.dp.rank
    shard = wanted.split(list(lengths))[rank].clone()
    grid.ledger.clear()
    with CollectiveCounter() as counter:
        if started:
            with grid.dp.async_collectives() as pending:
                grid.dp.all_gather(shard, "parameters", whole, lengths)
            pending.wait()
        else:
            grid.dp.all_gather(shard, "parameters", whole, lengths)
    return Gathered(whole.tolist(), wanted.tolist(), grid.ledger.total(), counter.ledger.total())


def reduce_all(world: World) -> dict[Case, Reduced]:
    """Return what every case came to on this rank."""
    grid = Grid.of(world)
    return {(name, at_once): _reduce(grid, LENGTHS[name], at_once) for name in LENGTHS for at_once in AT_ONCE}


def _reduce(grid: Grid, lengths: tuple[int, ...], at_once: int) -> Reduced:
    rank = grid.dp.rank
    everybodys = (
        torch.randn(RANKS, sum(lengths), generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(4)[:, None]
    )
    wanted = everybodys[0].clone()
    for other in everybodys[1:]:
        wanted += other
    full = everybodys[rank].clone()
    own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    grid.ledger.clear()
    kept, collectives.MAX_CHUNK_NUMEL = collectives.MAX_CHUNK_NUMEL, at_once
    try:
        with StorageTracker() as tracker:
            grid.dp.reduce_scatter(full, full[own], "gradients", None if len(set(lengths)) == 1 else lengths)
        bound = ITEM * collectives.reduce_scatter_workspace_numel(lengths, rank)
    finally:
        collectives.MAX_CHUNK_NUMEL = kept
    mine = full[own].clone()
    full[own] = everybodys[rank][own]
    return Reduced(
        torch.equal(mine, wanted[own]), torch.equal(full, everybodys[rank]), tracker.peak, bound, grid.ledger.total()
    )
