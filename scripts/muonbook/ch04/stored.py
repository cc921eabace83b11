"""What chapter 4 measures for book/results besides its races, from the settings that the stored race tuned.

Runs are shared out over two ranks. quick: a first impression, with few steps and seeds.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from distmuon import launch
from distmuon.launch import World
from muonbook.ch04 import image_datasets, originals, studies, sweep, tables, writing
from muonbook.ch04.tasks import TASKS, LearningTask
from muonbook.measure import results

RANKS = 2
PATIENCE = 6 * 3600.0  # seconds: a rank that has done its runs waits for those that have not


def sights(quick: bool) -> dict[str, Any]:
    """Change one thing about Muon at a time."""
    return launch.run(_study, (_size(quick, 5, 2),), dp=RANKS, timeout=PATIENCE)[0]


def blocks(quick: bool) -> dict[str, Any]:
    """Race Muon in blocks against Muon."""
    blockings = studies.BLOCKINGS[:3] if quick else studies.BLOCKINGS
    return launch.run(_blocks, (_size(quick, 8, 3), blockings), dp=RANKS, timeout=PATIENCE)[0]


def write(quick: bool) -> dict[str, Any]:
    """Let the race's three models write, after more and more steps."""
    seeds = sweep.RACE_SEEDS[: 5 if quick else 8]
    given = (_language(quick), tables.stored_settings("language"), seeds)
    return launch.run(writing.measure, given, dp=RANKS, timeout=PATIENCE)[0]


def step_times(quick: bool) -> dict[str, Any]:
    """Time a step of every optimizer against AdamW's, on the tasks whose race is stored."""
    return launch.run(_times, (4 if quick else 40,), dp=1, timeout=PATIENCE)[0]


def learning(quick: bool) -> dict[str, Any]:
    """Take from what is stored the numbers that the claims page quotes: medians over seeds, and of every pair how many
    seeds the first one wins. That is quick in any case."""
    kept = results.load("originals")
    recipes = {name: found for name in image_datasets.SOURCES if (found := kept.get(name))}
    return {
        "races": {name: tables.summary(race) for name, race in tables.stored_races().items()},
        "originals": {name: one if "missing" in one else originals.summary(one) for name, one in recipes.items()},
    }


def _language(quick: bool) -> LearningTask:
    return replace(TASKS["language"], steps=20) if quick else TASKS["language"]


def _size(quick: bool, seeds: int, tuning: int) -> studies.StudySize:
    """Return how much a study does, and for a first impression less."""
    if quick:
        return studies.StudySize(_language(quick), sweep.RACE_SEEDS[:5], sweep.TUNING_SEEDS[:1], farthest=0)
    return studies.StudySize(_language(quick), sweep.RACE_SEEDS[:seeds], sweep.TUNING_SEEDS[:tuning], farthest=3)


def _study(world: World, size: studies.StudySize) -> dict[str, Any]:
    best = tables.stored_settings("language")
    found = {name: study(world, best, size) for name, study in studies.STUDIES.items()}
    return {"best": {name: asdict(setting) for name, setting in best.items()}} | found


def _blocks(world: World, size: studies.StudySize, blockings: tuple[studies.Blocking, ...]) -> dict[str, Any]:
    return studies.blocks(world, tables.stored_settings("language")["muon"], size, blockings)


def _times(world: World, rounds: int) -> dict[str, Any]:
    stored, found = tables.stored_races(), dict[str, Any]()
    for name in stored:
        if missing := image_datasets.missing(name) if name in image_datasets.SOURCES else None:
            world.say(missing)
        else:
            found[name] = sweep.times(TASKS[name], tables.stored_settings(name), rounds)
    return found
