"""What ranks do for the tests of recording: a few steps of a small model, under the profiler."""

from typing import Any

from distmuon.launch import World
from distmuon.optim.overlap import OVERLAPS
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding import hooks
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from muonbook.ch14 import recording
from muonbook.measure.trainers import Trainer, sliced_model
from muonbook.measure.workload import Workload, batches, pixels

TINY = Workload(width=32, heads=4, layers=1, context=16, sequences=4, bucket_size=5_003)
STEPS = 2


def record(world: World, schedule: str) -> tuple[dict[str, Any], Ledger, list[str]]:
    """Return this rank's trace of two steps, what the ledger counted meanwhile, and what recording left behind."""
    grid = Grid.of(world)
    model, corpus = sliced_model(TINY, grid), pixels(grid, TINY.context)
    optimizer = OVERLAPS[schedule](split_parameters(model), grid, bucket_size=TINY.bucket_size)
    trainer = Trainer(model, [optimizer])
    data = batches(TINY, corpus, grid.dp.size, grid.dp.rank)
    trainer.step(next(data))
    objects = (optimizer, optimizer.strategy, trainer, grid.ledger)
    before = [set(vars(each)) for each in objects]
    grid.ledger.clear()
    trace = recording.record(world, lambda: trainer.step(next(data)), STEPS, grid)
    left = [name for each, names in zip(objects, before, strict=True) for name in set(vars(each)) - names]
    return trace, grid.ledger, left + ["a hook"] * len(hooks._around_moves)
