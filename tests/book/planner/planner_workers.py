"""What a rank counts of every baseline's step, beside what the planner says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify import model_states
from distmuon.verify.counter import CollectiveCounter
from muonbook.measure.trainers import Trainer
from muonbook.measure.workload import Workload, batches, pixels
from muonbook.planner.measured import timed_worlds


def facts(world: World, workload: Workload, baselines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return per baseline what this rank sends in a step and keeps before its update, counted and planned."""
    grid, activations = Grid.of(world), Ledger()
    rank, each = (grid.dp.rank, grid.tp.rank), workload.tokens // world.dp
    _, _, model = workload.plan(world.dp, world.tp)
    model.predict_activations(activations, each, workload.torch_dtype.itemsize, world.tp)
    data = batches(workload, pixels(grid, workload.context), world.dp, grid.dp.rank)
    found = {}
    for name in baselines:
        trainer, (part, ledger) = timed_worlds.make(name, workload, grid), timed_worlds.planned(name, workload, grid)
        trainer.step(next(data))  # makes the state
        counted: dict[str, int] = {}

        def look(trainer: Trainer = trainer, counted: dict[str, int] = counted) -> None:
            counted.update(model_states.count(trainer.tensors()))

        with CollectiveCounter() as counter:
            trainer.step(next(data), before_update=look)
        sent = sum(int(_on(rank, part.dp, column)) for column in part.sent().values())
        found[name] = {
            "sent": counter.ledger.total().sent_bytes,
            "planned_sent": sent + activations.total().sent_bytes,
            "in_ledger": ledger.total().sent_bytes,
            "held": counted,
            "planned_held": {kind: int(column[grid.dp.rank]) for kind, column in part.states().items()},
        }
    return found


def _on(rank: tuple[int, int], dp: int, column: np.ndarray) -> int:
    """Return what a column over DP ranks, or over all ranks, says of one."""
    rows = column.reshape(dp, -1)
    return int(rows[rank[0]][rank[1] if rows.shape[1] > 1 else 0])
