"""One training step, recorded: what chapter 14's first run does on every rank."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from muonbook.ch14 import recording
from muonbook.measure import baselines
from muonbook.measure.workload import SHAPES, batches, pixels


def train(world: World) -> tuple[dict[str, Any], list[Ledger]] | None:
    """Train two steps, the second one under the profiler; on rank 0, return the merged trace and every rank's ledger
    of it."""
    workload, grid = SHAPES["even"].shared_by(world.dp), Grid.of(world)
    data = batches(workload, pixels(grid, workload.context), grid.dp.size, grid.dp.rank)
    trainer = baselines.make_muon(workload, grid)
    trainer.step(next(data))
    grid.ledger.clear()
    mine = recording.record(world, partial(trainer.step, next(data)), 1, grid)
    traces, ledgers = world.gather(mine), world.gather(copy.deepcopy(grid.ledger))
    return None if traces is None or ledgers is None else (recording.merge(traces), ledgers)
