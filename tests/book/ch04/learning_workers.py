"""Workers for the tests of chapter 4's package, at the top level of a module, where ranks find them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from muonbook.ch04 import sharded_training
from muonbook.ch04.search_space import Setting
from muonbook.ch04.sharded_training import Comparison, GridTraining
from muonbook.ch04.tasks import TASKS, Examples, LearningTask
from muonbook.ch04.training import LossCurve, Outcome, Training

STEPS, WINDOWS, SEED = 12, 8, 3
SETTINGS = {
    "muon": Setting("muon", 0.016, 0.1, 0.9, others=0.5),
    "adamw": Setting("adamw", 0.004, 0.1, 0.8, others=2.0, second_beta=0.97),
}
DIVERGING = Setting("adamw", 1e200, 0.1, 0.9)


def small(name: str, dtype: str = "float64", steps: int = STEPS) -> LearningTask:
    """Return a task of few steps; of the language, with few windows per batch and few held out."""
    task = TASKS[name].with_dtype(dtype).shorter(steps)
    if name != "language":
        return task

    def examples(task: LearningTask, seed: int) -> tuple[Examples, Examples]:
        training, held_out = TASKS[name].examples(task, seed)
        return training, held_out.rows(torch.arange(WINDOWS))

    return replace(task, batch=4, examples=examples)


# ---- The same training, and three that are not ------------------------------------------------------------


class Found(NamedTuple):
    """What one rank hands over. comparisons: one per case; outcome: of a training, as this rank sees it."""

    comparisons: list[Comparison | None]
    outcome: Outcome


def compare_all(world: World, cases: list[tuple[str, str, str]]) -> Found:
    """Compare every (task, optimizer, dtype) with one process."""
    found = [
        sharded_training.compare(world, small(t, dtype), SETTINGS[optimizer], SEED) for t, optimizer, dtype in cases
    ]
    return Found(found, sharded_training.train_on_grid(world, small("digits", "float32", 3), SETTINGS["muon"], SEED))


def same_rows(run: GridTraining, step: int) -> Examples:
    """Give every DP rank the first one's rows."""
    batch = Training.batch(run, step)
    return batch.rows(torch.arange(len(batch) // run.grid.dp.size))


def shuffled_apart(run: GridTraining, step: int) -> Examples:
    """Let every DP rank draw batches in an order of its own."""
    seed = run.seed
    run.seed += 1000 * run.grid.dp.rank
    batch = run.share(Training.batch(run, step))
    run.seed = seed
    return batch


def in_bf16(optimizer: Callable[..., object]) -> Callable[..., object]:
    """Let the momentum travel in bf16."""
    return lambda model, setting, grid, gather_dtype: optimizer(model, setting, grid, torch.bfloat16)


WRONG: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "same rows": lambda: mock.patch.object(GridTraining, "batch", same_rows),
    "shuffled apart": lambda: mock.patch.object(GridTraining, "batch", shuffled_apart),
    "bf16 momentum": lambda: mock.patch.object(
        sharded_training, "sharded_optimizer", in_bf16(sharded_training.sharded_optimizer)
    ),
}


def compare_wrong(world: World) -> dict[str, Comparison | None]:
    """Compare trainings with one mistake each with the single process, and one that diverges without a mistake."""
    found = {"diverging": sharded_training.compare(world, small("digits"), DIVERGING, SEED)}
    for name, mistake in WRONG.items():
        with mistake():
            found[name] = sharded_training.compare(world, small("digits", steps=6), SETTINGS["muon"], SEED)
    return found


# ---- A gradient that is not finite ------------------------------------------------------------------------


def lose_a_gradient(model: torch.nn.Module, at: int) -> None:
    """Let the head's gradient of backward pass number `at` be NaN; the loss before it is not."""
    calls = iter(range(1000))
    model.get_parameter("head.weight").register_hook(lambda g: g * float("nan") if next(calls) == at else None)


def course_of(run_task: LearningTask, setting: Setting, lost_at: int) -> Outcome:
    """Return the outcome on the 1 x 1 grid, one gradient being lost on the way."""
    run = GridTraining.of(run_task, setting, SEED, Grid.alone())
    lose_a_gradient(run.model, lost_at)
    return LossCurve(run, setting).outcome()
