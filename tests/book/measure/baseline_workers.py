"""Workers for tests/book/measure/test_baselines.py, at the top level of a module, where ranks find them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distmuon.launch import World
from distmuon.optim.muon import Muon
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.counter import CollectiveCounter
from muonbook.ch12 import byte_counts
from muonbook.contenders import CONTENDERS
from muonbook.measure import profiler
from muonbook.measure.workload import SHAPES, batches, pixels

NAMES = ("ddp", "zero1", "torch_zero", "muon", "muon_ddp", "muon_fsdp2")


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


def stray(world: World, steps: int = 3) -> dict[str, float]:
    """Return how far FSDP2's Muon strays from torch.optim.Muon on one process that reads the whole batch. Collective.

    {"stray": that, "rounding": how far the one process strays from Muon in float32}: both the largest over matrices of
    |difference| / |movement|, Frobenius norms, after `steps` steps.
    """
    grid, workload = Grid.of(world), SHAPES["even"].shared_by(world.dp)
    alone, corpus = Grid.alone(grid.device.type), pixels(grid, workload.context)

    def trained(name: str, where: Grid, steps: int, **muon: Any) -> list[Tensor]:
        trainer = CONTENDERS[name].make(workload, where)
        matrices = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        if muon:
            trainer.optimizers[0] = Muon(matrices, **workload.hyperparameters, **muon)
        data = batches(workload, corpus, where.dp.size, where.dp.rank)
        for _ in range(steps):
            trainer.step(next(data))
        return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in matrices]

    begin, one = trained("muon_fsdp2", alone, 0), trained("muon_fsdp2", alone, steps)

    def away(others: list[Tensor]) -> float:
        rows = zip(others, one, begin, strict=True)
        return max(((other - mine).norm() / (mine - first).norm()).item() for other, mine, first in rows)

    exact = trained("muon_ddp", alone, steps, input_dtype=torch.float32)
    return {"stray": away(trained("muon_fsdp2", grid, steps)), "rounding": away(exact)}


def train(world: World, steps: int) -> dict[str, list[float]]:
    """Return every baseline's losses, means over ranks."""
    grid = Grid.of(world)
    losses: dict[str, list[float]] = {}
    workload = SHAPES["odd"].shared_by(world.dp)
    corpus = pixels(grid, workload.context)
    for name in NAMES:
        trainer, data = CONTENDERS[name].make(workload, grid), batches(workload, corpus, world.dp, grid.dp.rank)
        losses[name] = []
        for _ in range(steps):
            loss = trainer.step(next(data))
            losses[name].append(grid.dp.all_reduce(loss, "loss").item() / world.dp)
    return losses
