"""Workers for tests/book/measure/test_baselines.py, at the top level of a module, where ranks find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distmuon.launch import World
from distmuon.sharding.ledger import Ledger


def count_on_grids(world: World, grids: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[Any] | None]:
    """Return {grid: on rank 0, what every rank counted there}; the same ranks stand on one grid after the other."""
    from muonbook.ch12 import byte_results

    return {
        (dp, tp): byte_results.on_rank_count(replace(world, dp=dp, tp=tp), byte_results.shapes_on(dp, tp))
        for dp, tp in grids
    }


def count_dtensor(world: World) -> tuple[Ledger, Ledger, Ledger]:
    """Return what the counter saw of one DTensor made whole, and of torch's Muon: in the model and in the update."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    from distmuon.sharding.grid import Grid
    from distmuon.verify.counter import CollectiveCounter
    from muonbook.ch12.byte_counts import count_fsdp2
    from muonbook.measure.workload import SHAPES

    grid = Grid.of(world)
    assert grid.mesh is not None
    sharded = distribute_tensor(torch.ones(6, 4), grid.mesh["dp"], [Shard(0)])
    with CollectiveCounter() as counter:
        sharded.full_tensor()
    return counter.ledger, *count_fsdp2(grid, SHAPES["even"].shared_by(world.dp))


def stray(world: World) -> dict[str, float]:
    """Return how far FSDP2's Muon is from torch's Muon on one process, and that from float32."""
    from distmuon.sharding.grid import Grid
    from muonbook.ch12.byte_counts import stray_fsdp2
    from muonbook.measure.workload import SHAPES

    return stray_fsdp2(Grid.of(world), SHAPES["even"].shared_by(world.dp))


def train(world: World, steps: int) -> dict[str, list[float]]:
    """Return every contender's losses, means over ranks."""
    from distmuon.sharding.grid import Grid
    from muonbook.measure.baselines import CONTENDERS
    from muonbook.measure.workload import SHAPES, batches, pixels

    grid = Grid.of(world)
    losses: dict[str, list[float]] = {}
    workload = SHAPES["odd"].shared_by(world.dp)
    corpus = pixels(grid, workload.context)
    for name, contender in CONTENDERS.items():
        trainer, data = contender.make(workload, grid, None), batches(workload, corpus, world.dp, grid.dp.rank)
        losses[name] = []
        for _ in range(steps):
            loss = trainer.forward_backward(*next(data))
            losses[name].append(grid.dp.all_reduce(loss.clone(), "loss").item() / world.dp)
            trainer.update()
    return losses
