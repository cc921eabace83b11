"""What chapter 4b's worker can be asked for: each job runs on every rank, prints, and returns what is stored."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from distmuon.launch import World
from muonbook.ch04 import sweep, tasks
from muonbook.ch04.studies import ablations, blocks, tables, writing
from muonbook.ch04.tables import stored_settings

Arguments = argparse.Namespace


def check() -> None:
    """Raise UsageError where the race is not stored whose settings everything here begins with."""
    stored_settings("language")


def study(world: World, arguments: Arguments) -> dict[str, Any]:
    """Take the studies that are named, from the settings that the stored race tuned."""
    size = ablations.QUICK if arguments.quick else ablations.FULL
    if arguments.steps is not None:
        size = replace(size, steps=arguments.steps)
    if arguments.seeds is not None:
        seeds = sweep.RACE_SEEDS[: arguments.seeds]
        size = replace(size, seeds=seeds, spectra_seeds=seeds)
    found = ablations.measure(world, stored_settings("language"), arguments.study, size)
    for name in arguments.study:
        world.say("\n".join([f"{name}:", *tables.LINES[name](found[name])]))
    return found


def compare_blocks(world: World, arguments: Arguments) -> dict[str, Any]:
    """Race Muon in blocks against Muon, from the setting that the stored race tuned for the latter."""
    best, task = stored_settings("language")["muon"], tasks.TASKS["language"]
    steps = 20 if arguments.quick and arguments.steps is None else arguments.steps
    task = task if steps is None else task.shorter(steps)
    tuning = sweep.TUNING_SEEDS[: 1 if arguments.quick else arguments.tuning_seeds]
    seeds = sweep.RACE_SEEDS[: arguments.seeds or len(sweep.RACE_SEEDS)]
    found = blocks.measure(world, best, task, tuning, seeds, blocks.ARMS[:3] if arguments.quick else blocks.ARMS)
    world.say("\n".join(blocks.lines(found)))
    return found


def let_write(world: World, arguments: Arguments) -> dict[str, Any]:
    """Let the race's three models write, after more and more steps."""
    steps = arguments.steps or (20 if arguments.quick else tasks.TASKS["language"].steps)
    seeds = sweep.RACE_SEEDS[: arguments.seeds or (1 if arguments.quick else len(sweep.RACE_SEEDS))]
    found = writing.measure(world, stored_settings("language"), seeds, steps)
    world.say("\n".join(writing.lines(found)))
    return found
