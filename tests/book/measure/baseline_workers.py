"""Workers for tests/book/measure/test_baselines.py, at the top level of a module, where ranks find them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.counter import CollectiveCounter
from muonbook.ch12 import byte_counts
from muonbook.measure.workload import SHAPES, batches, pixels
from muonbook.runnable_baselines import RUNNABLE

NAMES = ("ddp", "zero1", "torch_zero", "muon", "muon_ddp", "muon_fsdp2")


def count_dtensor(world: World) -> tuple[Ledger, Ledger, Ledger]:
    """Return what the counter saw of one DTensor made whole, and of torch's Muon: in the model and in the update."""
    grid = Grid.of(world)
    assert grid.mesh is not None
    sharded = distribute_tensor(torch.ones(6, 4), grid.mesh["dp"], [Shard(0)])
    with CollectiveCounter() as counter:
        sharded.full_tensor()
    return counter.ledger, *byte_counts.count_fsdp2(world, SHAPES["even"].shared_by(world.dp))


def train(world: World, steps: int) -> dict[str, list[float]]:
    """Return every baseline's losses, means over ranks."""
    grid = Grid.of(world)
    losses: dict[str, list[float]] = {}
    workload = SHAPES["odd"].shared_by(world.dp)
    corpus = pixels(grid, workload.context)
    for name in NAMES:
        trainer, data = RUNNABLE[name].make(workload, grid), batches(workload, corpus, world.dp, grid.dp.rank)
        losses[name] = []
        for _ in range(steps):
            loss = trainer.step(next(data))
            losses[name].append(grid.dp.all_reduce(loss, "loss").item() / world.dp)
    return losses
