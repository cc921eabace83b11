"""What chapter 4's worker can be asked for: each job runs on every rank, and returns what is stored. A race prints it.

`sum_up` measures nothing: it takes the few numbers that the claims page quotes from what is stored.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from distmuon.launch import World
from muonbook.ch04 import image_datasets, originals, studies, sweep, tables, writing
from muonbook.ch04.tasks import TASKS, LearningTask
from muonbook.measure import results

Arguments = argparse.Namespace


def missing_data(names: Sequence[str]) -> str | None:
    """Return the sentence that says which data is not here, or None if that of any of the tasks is."""
    missing = [image_datasets.missing(name) if name in image_datasets.SOURCES else None for name in names]
    return missing[0] if all(missing) else None


def fetch(names: Sequence[str]) -> None:
    """Download what is missing of these data sets."""
    for name in names:
        image_datasets.fetch_all(name)


def check() -> None:
    """Raise UsageError where the race is not stored whose settings a job begins with."""
    tables.stored_settings("language")


def shortened(task: LearningTask, arguments: Arguments) -> LearningTask:
    return replace(task, steps=arguments.steps or task.steps)


def race(world: World, arguments: Arguments) -> dict[str, Any]:
    """Tune and race."""
    task = replace(TASKS[arguments.task[0]], dtype=getattr(torch, arguments.dtype), device=world.device)
    tuning, seeds = sweep.TUNING_SEEDS[: arguments.tuning_seeds], range(arguments.seeds)
    alone = arguments.tune == "lr"
    found = sweep.race(world, shortened(task, arguments), arguments.optimizer, tuning, seeds, alone)
    world.say("\n".join(tables.result_lines(found) + tables.verdict_lines(found)))
    return found


def repeat_originals(world: World, arguments: Arguments) -> dict[str, Any]:
    """Run a public tutorial's recipe as written, and tuned."""
    found = originals.study(world, arguments.task, range(5), arguments.quick)
    world.say("\n".join(originals.lines(found)))
    return found


def time_steps(world: World, arguments: Arguments) -> dict[str, Any]:
    """Time a step of every optimizer against AdamW's, on the tasks whose race is stored."""
    found = {}
    for name in tables.stored_races():
        if missing := missing_data([name]):
            world.say(missing)
            continue
        found[name] = sweep.times(TASKS[name], tables.stored_settings(name))
    return found


def study_size(arguments: Arguments) -> studies.StudySize:
    """Return how much a study does."""
    tuning, farthest = sweep.TUNING_SEEDS[: arguments.tuning_seeds], 0 if arguments.quick else 3
    task = shortened(TASKS["language"], arguments)
    return studies.StudySize(task, sweep.RACE_SEEDS[: arguments.seeds], tuning, farthest)


def study(world: World, arguments: Arguments) -> dict[str, Any]:
    """Take the studies that are named, from the settings that the stored race tuned."""
    best, found = tables.stored_settings("language"), dict[str, Any]()
    for name in arguments.study:
        found[name] = studies.STUDIES[name](world, best, study_size(arguments))
    return {"best": {name: asdict(setting) for name, setting in best.items()}} | found


def compare_blocks(world: World, arguments: Arguments) -> dict[str, Any]:
    """Race Muon in blocks against Muon, from the setting that the stored race tuned for the latter."""
    blockings = studies.BLOCKINGS[:3] if arguments.quick else studies.BLOCKINGS
    return studies.blocks(world, tables.stored_settings("language")["muon"], study_size(arguments), blockings)


def let_write(world: World, arguments: Arguments) -> dict[str, Any]:
    """Let the race's three models write, after more and more steps."""
    task, seeds = shortened(TASKS["language"], arguments), sweep.RACE_SEEDS[: arguments.seeds]
    return writing.measure(world, task, tables.stored_settings("language"), seeds)


def sum_up(world: World, arguments: Arguments) -> dict[str, Any]:
    """Take medians over seeds from what is stored, and of every pair how many seeds the first one wins."""
    kept = results.load("originals")
    recipes = {name: found for name in image_datasets.SOURCES if (found := kept.get(name))}
    return {
        "races": {name: tables.summary(race) for name, race in tables.stored_races().items()},
        "originals": {name: one if "missing" in one else originals.summary(one) for name, one in recipes.items()},
    }
