"""One training step of AdamW and one of Muon, recorded: what chapter 14's first run does on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from muonbook.ch14 import recording
from muonbook.measure import baselines
from muonbook.measure.baselines import Trainer
from muonbook.measure.workload import SHAPES, Workload, batches, pixels

MAKERS: dict[str, Callable[[Workload, Grid], Trainer]] = {  # by the names that their traces bear
    "adamw": baselines.make_zero1,
    "muon": baselines.make_muon,
}


class RecordedStep(NamedTuple):
    """A training step as all ranks recorded it. trace: merged. ledgers: of the ranks, in their order."""

    trace: dict[str, Any]
    ledgers: list[Ledger]


def train(world: World, recordings: int = 1) -> dict[str, RecordedStep] | None:
    """Train each of MAKERS from the same weights on the same data, every step after the first under the profiler.

    On rank 0, return by name the quickest of so many `recordings`, which is the one that was disturbed least.
    """
    workload, grid = SHAPES["even"].shared_by(world.dp), Grid.of(world)
    corpus, found = pixels(grid, workload.context), dict[str, RecordedStep]()
    for name, make in MAKERS.items():
        data = batches(workload, corpus, grid.dp.size, grid.dp.rank)
        trainer = make(workload, grid)
        trainer.step(next(data))
        steps = [_record(world, grid, partial(trainer.step, next(data))) for _ in range(recordings)]
        if whole := [step for step in steps if step is not None]:
            found[name] = quickest(whole)
    return found or None


def _record(world: World, grid: Grid, step: Callable[[], Any]) -> RecordedStep | None:
    """Return one step as all ranks recorded it, on rank 0. Collective."""
    grid.ledger.clear()
    traces = world.gather(recording.record(world, step, 1, grid))
    ledgers = world.gather(copy.deepcopy(grid.ledger))
    return None if traces is None or ledgers is None else RecordedStep(recording.merge(traces), ledgers)


def quickest(steps: Sequence[RecordedStep]) -> RecordedStep:
    """Return the step that took the least time."""
    return min(steps, key=lambda step: recording.span(step.trace))
