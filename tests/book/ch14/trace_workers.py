"""What ranks do for the tests of recording: a few steps of a small model, under the profiler."""

from typing import Any

from distmuon.launch import World
from distmuon.optim.routing import split_parameters
from distmuon.optim.schedules import SCHEDULES
from distmuon.sharding.collectives import PendingWork
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import load_slices
from muonbook.ch14 import tracing
from muonbook.measure.baselines import Trainer
from muonbook.measure.workload import Workload, batches, pixels

TINY = Workload(width=32, heads=4, layers=1, context=16, sequences=4, bucket_size=5_003)
STEPS = 2


def record(world: World, schedule: str) -> tuple[dict[str, Any], Ledger, list[str]]:
    """Return this rank's trace of two steps, what the ledger counted meanwhile, and what recording left behind."""
    grid = Grid.of(world)
    model = TINY.model(grid.tp)
    load_slices(model, TINY.weights(), grid.tp)
    optimizer = SCHEDULES[schedule](split_parameters(model), grid, bucket_size=TINY.bucket_size)
    trainer, corpus = Trainer(model, [optimizer]), pixels(grid, TINY.context)
    data = batches(TINY, corpus, grid.dp.size, grid.dp.rank)

    def step() -> None:
        trainer.forward_backward(*next(data))
        trainer.update()

    step()
    objects = (optimizer, optimizer.strategy, trainer, grid.ledger)
    before, wait = [set(vars(each)) for each in objects], PendingWork.wait
    grid.ledger.clear()
    trace = tracing.record(world, step, STEPS, optimizer, trainer, also={"check_and_clip": "agreed"})
    left = [name for each, names in zip(objects, before, strict=True) for name in set(vars(each)) - names]
    return trace, grid.ledger, left + ["PendingWork.wait"] * (PendingWork.wait is not wait)


def record_alone(world: World) -> dict[str, Any]:
    """Return the trace of something that is no optimizer of ours."""
    import torch

    return tracing.record(world, lambda: torch.ones(8, 8) @ torch.ones(8, 8), 3)
