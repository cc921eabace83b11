"""What chapter 4's worker can be asked for: each job runs on every rank, prints, and returns what is stored.

`sum_up` measures nothing: it takes the few numbers that the claims page quotes from what is stored.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from distmuon.launch import World
from muonbook.ch04 import image_datasets, recipe_study, studies, sweep, tables, tasks, writing
from muonbook.ch04.search_space import BETAS, Setting, candidate
from muonbook.ch04.tasks import LearningTask
from muonbook.measure import results

Arguments = argparse.Namespace

# ---- What the command line chooses ------------------------------------------------------------------------


def chosen_task(arguments: Arguments, device: str) -> LearningTask:
    """Return the task with what the command line changes of it."""
    task = replace(tasks.TASKS[arguments.task[0]].with_dtype(arguments.dtype), device=device)
    return task if arguments.steps is None else task.shorter(arguments.steps)


def chosen_setting(arguments: Arguments, name: str) -> Setting:
    """Return the setting of --lr, --weight-decay, --momentum, --others and --second-beta, as usual where not given."""
    chosen, lr = candidate(name), arguments.lr[min(len(arguments.lr) - 1, arguments.optimizer.index(name))]

    def given(option: float | None, usual: float) -> float:
        return usual if option is None else option

    return Setting(
        name,
        lr,
        given(arguments.weight_decay, chosen.weight_decays[-1]),
        given(arguments.momentum, chosen.usual),
        given(arguments.others, 1.0),
        given(arguments.second_beta, BETAS[1]),
    )


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


# ---- Trainings --------------------------------------------------------------------------------------------


def race(world: World, arguments: Arguments) -> dict[str, Any]:
    """Tune and race."""
    task, tuning = chosen_task(arguments, world.device), sweep.TUNING_SEEDS[: arguments.tuning_seeds]
    alone = arguments.tune == "lr"
    found = sweep.race(world, task, arguments.optimizer, tuning, range(arguments.seeds), alone)
    world.say("\n".join(tables.result_lines(found) + tables.verdict_lines(found)))
    return found


def train(world: World, arguments: Arguments) -> dict[str, Any]:
    """Run every optimizer named at --lr, without tuning; print the held-out losses along the way."""
    task = chosen_task(arguments, world.device)
    settings = [chosen_setting(arguments, name) for name in arguments.optimizer]
    outcomes = sweep.runner(world, task)([(s, seed) for s in settings for seed in range(arguments.seeds)])
    found = sweep.described(task, range(arguments.seeds)) | {"runs": [asdict(outcome) for outcome in outcomes]}
    world.say("\n".join(tables.run_lines(found)))
    return found


def repeat_originals(world: World, arguments: Arguments) -> dict[str, Any]:
    """Run a public tutorial's recipe as written, and tuned."""
    found = recipe_study.study(world, arguments.task, range(5), arguments.quick)
    world.say("\n".join(recipe_study.lines(found)))
    return found


def time_steps(world: World, arguments: Arguments) -> dict[str, Any]:
    """Time a step of every optimizer against AdamW's, on the tasks whose race is stored."""
    found = {}
    for name, stored in tables.stored_races().items():
        if missing := missing_data([name]):
            world.say(missing)
            continue
        found[name] = sweep.times(tasks.TASKS[name], tables.stored_settings(name))
        world.say("\n".join(tables.price_lines(stored, found[name])))
    return found


# ---- One thing changed ------------------------------------------------------------------------------------


def study_size(arguments: Arguments) -> studies.StudySize:
    """Return how much a study does."""
    task = tasks.TASKS["language"]
    return studies.StudySize(
        task if arguments.steps is None else task.shorter(arguments.steps),
        sweep.RACE_SEEDS[: arguments.seeds],
        sweep.TUNING_SEEDS[: arguments.tuning_seeds],
        0 if arguments.quick else 3,
    )


def study(world: World, arguments: Arguments) -> dict[str, Any]:
    """Take the studies that are named, from the settings that the stored race tuned."""
    best, found = tables.stored_settings("language"), dict[str, Any]()
    for name in arguments.study:
        found[name] = studies.STUDIES[name](world, best, study_size(arguments))
        parts = {key: rows for key, rows in found[name].items() if key in ("rows", "tuned")}
        world.say(
            "\n".join(line for key, rows in parts.items() for line in (f"{name}, {key}:", *studies.lines(name, rows)))
        )
    return {"best": {name: asdict(setting) for name, setting in best.items()}} | found


def compare_blocks(world: World, arguments: Arguments) -> dict[str, Any]:
    """Race Muon in blocks against Muon, from the setting that the stored race tuned for the latter."""
    arms = studies.ARMS[:3] if arguments.quick else studies.ARMS
    found = studies.blocks(world, tables.stored_settings("language")["muon"], study_size(arguments), arms)
    world.say("\n".join(studies.lines("blocks", found["rows"])))
    return found


def let_write(world: World, arguments: Arguments) -> dict[str, Any]:
    """Let the race's three models write, after more and more steps."""
    steps = arguments.steps or tasks.TASKS["language"].steps
    found = writing.measure(world, tables.stored_settings("language"), sweep.RACE_SEEDS[: arguments.seeds], steps)
    world.say("\n".join(writing.lines(found)))
    return found


# ---- In a few numbers -------------------------------------------------------------------------------------


def sum_up(world: World, arguments: Arguments) -> dict[str, Any]:
    """Take the numbers that the claims page quotes from what is stored."""
    return summarize()


def summarize() -> dict[str, Any]:
    """Return medians over seeds, and of every pair how many seeds the first one wins. Raises UsageError, see `load`."""
    return {
        "races": {name: of_race(race) for name, race in tables.stored_races().items()},
        "originals": {
            name: found if "missing" in found else of_originals(found)
            for name, found in results.load("originals").items()
            if isinstance(found, dict) and ("missing" in found or "tuned" in found)
        },
    }


def wins(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Return on how many seeds the first has the smaller loss, and whether a difference may be claimed."""
    found = sweep.verdict(first, second)
    return {"wins": found.wins, "losses": found.losses, "seeds": found.seeds, "claimed": found.claimed}


def of_race(race: Mapping[str, Any]) -> dict[str, Any]:
    """Return the medians of gaps (of losses, where no floor is known), the pairs, and what it takes to catch AdamW.

    to_adamw: the share of AdamW's steps, and of its operations, after which Muon has AdamW's final loss; None if never.
    """
    pairs = {f"{a}_{b}": (tables.gaps(race, a), tables.gaps(race, b)) for a, b in tables.verdicts(race)}
    return {
        "median": {name: statistics.median(tables.gaps(race, name)) for name in race["racers"]},
        "pairs": {names: wins(*both) for names, both in pairs.items()},
        "to_adamw": tables.to_reach(race, "muon") or {"steps": None, "operations": None},
    }


def of_originals(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return, as written and tuned, every optimizer's medians and Muon's training loss over AdamW's."""
    told: dict[str, Any] = {"flops_over_network": found["flops"]["muon"] / found["flops"]["network"]}
    for race in ("as_written", "tuned"):
        columns = {
            optimizer: {
                measure.replace(" ", "_"): [of(run) for run in runs] for measure, of in recipe_study.MEASURES.items()
            }
            for optimizer, runs in found[race].items()
        }
        medians = {
            optimizer: {measure: statistics.median(values) for measure, values in by.items()}
            for optimizer, by in columns.items()
        }
        muon, adamw = columns["muon"], columns["adamw"]
        ratio = medians["muon"]["training_loss"] / medians["adamw"]["training_loss"]
        pairs = {measure: wins(muon[measure], adamw[measure]) for measure in muon}
        told[race] = {"median": medians, "muon_over_adamw": {"training_loss": ratio}, "muon_against_adamw": pairs}
    return told
