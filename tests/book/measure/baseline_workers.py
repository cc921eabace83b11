"""Workers for tests/book/measure/test_baselines.py, at the top level of a module, where ranks find them."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.counter import CollectiveCounter
from muonbook.ch12 import byte_counts
from muonbook.measure import profiler
from muonbook.measure.baselines import BASELINES
from muonbook.measure.workload import SHAPES, batches, pixels


def count_dtensor(world: World) -> tuple[Ledger, Ledger, Ledger]:
    """Return what the counter saw of one DTensor made whole, and of torch's Muon: in the model and in the update."""
    grid = Grid.of(world)
    assert grid.mesh is not None
    sharded = distribute_tensor(torch.ones(6, 4), grid.mesh["dp"], [Shard(0)])
    with CollectiveCounter() as counter:
        sharded.full_tensor()
    return counter.ledger, *byte_counts.count_fsdp2(world, SHAPES["even"].shared_by(world.dp))


def reduce_scattered(world: World) -> list[str]:
    """Return by what names a trace knows a reduce-scatter of torch's own, on gloo: its operators and annotations."""
    inputs, mine = torch.ones(2 * world.size), torch.empty(2)
    with profiler.profiled() as events, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames it
        dist.reduce_scatter_tensor(mine, inputs)
    kinds = ("cpu_op", "user_annotation")
    names = [event["name"] for event in events if event.get("cat") in kinds]
    return [name for name in names if name.startswith(("c10d::", "gloo:"))]


def stray(world: World) -> dict[str, float]:
    """Return how far FSDP2's Muon is from torch's Muon on one process, and that from float32."""
    return byte_counts.stray_fsdp2(world, SHAPES["even"].shared_by(world.dp))


def train(world: World, steps: int) -> dict[str, list[float]]:
    """Return every baseline's losses, means over ranks."""
    grid = Grid.of(world)
    losses: dict[str, list[float]] = {}
    workload = SHAPES["odd"].shared_by(world.dp)
    corpus = pixels(grid, workload.context)
    for name, baseline in BASELINES.items():
        trainer, data = baseline.make(workload, grid, None), batches(workload, corpus, world.dp, grid.dp.rank)
        losses[name] = []
        for _ in range(steps):
            loss = trainer.step(next(data))
            losses[name].append(grid.dp.all_reduce(loss, "loss").item() / world.dp)
    return losses
