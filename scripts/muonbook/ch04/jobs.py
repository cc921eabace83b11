"""What chapter 4's worker can be asked for: each job runs on every rank, prints, and returns what is stored."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from distmuon.launch import World
from muonbook.ch04 import image_datasets, originals, sweep, tables
from muonbook.ch04.tasks import TASKS

Arguments = argparse.Namespace


def missing_data(names: Sequence[str]) -> str | None:
    """Return the sentence that says which data is not here, or None if that of any of the tasks is."""
    missing = [image_datasets.missing(name) if name in image_datasets.SOURCES else None for name in names]
    return missing[0] if all(missing) else None


def fetch(names: Sequence[str]) -> None:
    """Download what is missing of these data sets."""
    for name in names:
        image_datasets.fetch_all(name)


def race(world: World, arguments: Arguments) -> dict[str, Any]:
    """Tune and race."""
    task = replace(TASKS[arguments.task[0]], dtype=getattr(torch, arguments.dtype), device=world.device)
    task = replace(task, steps=arguments.steps or task.steps)
    tuning, seeds = sweep.TUNING_SEEDS[: arguments.tuning_seeds], range(arguments.seeds)
    alone = arguments.tune == "lr"
    found = sweep.race(world, task, arguments.optimizer, tuning, seeds, alone)
    world.say("\n".join(tables.result_lines(found) + tables.verdict_lines(found)))
    return found


def repeat_originals(world: World, arguments: Arguments) -> dict[str, Any]:
    """Run a public tutorial's recipe as written, and tuned."""
    found = originals.study(world, arguments.task, range(5), arguments.quick)
    world.say("\n".join(originals.lines(found)))
    return found
