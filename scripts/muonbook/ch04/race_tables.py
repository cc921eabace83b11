"""What a race found, as lines of a page: settings, losses of the fresh seeds, verdicts, and prices."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from distmuon.launch import UsageError
from muonbook.ch04.baselines import RACERS, Setting
from muonbook.ch04.datasets import SOURCES, not_run_lines
from muonbook.ch04.sweep import Verdict, span, verdict
from muonbook.ch04.tasks import TASKS, Task
from muonbook.ch04.training import Outcome
from muonbook.measure import results


def finals(racer: Mapping[str, Any]) -> list[float]:
    """Return the final held-out loss of every seed; infinite where the run diverged."""
    return by_look(racer)[-1]


def gaps(race: Mapping[str, Any], name: str) -> list[float]:
    """Return final losses over the floor, where there is one."""
    return [loss - (race["floor"] or 0.0) for loss in finals(race["racers"][name])]


def by_median(race: Mapping[str, Any]) -> list[str]:
    """Return the racers' names, the least median first."""
    return sorted(race["racers"], key=lambda name: statistics.median(gaps(race, name)))


def result_lines(race: Mapping[str, Any], digits: int = 3) -> list[str]:
    """Return the best settings, and what they reached on the fresh seeds."""
    seeds = len(next(iter(race["racers"].values()))["seeds"])
    measure = "gap to the floor" if race["floor"] is not None else "held-out loss"
    lines = [
        f"{race['task']}, {race['steps']} steps of {race['batch']}: {measure}, median [range] of {seeds} fresh seeds"
    ]
    for name in by_median(race):
        racer, setting = race["racers"][name], race["racers"][name]["best"]
        option = f"{RACERS[name].option} {setting['option']:g}" + " (at an end of its grid)" * at_an_end(racer)
        right = f"{statistics.median(racer['accuracy']):.1%}"
        lines.append(
            f"  {RACERS[name].title:6}{span(gaps(race, name), digits):24}{right:>6} right"
            f"   lr {setting['lr']:g}, decay {setting['weight_decay']:g}, {option}"
        )
    if race["floor"] is not None:
        lines.append(f"  floor {race['floor']:.3f} nats per letter: what the best predictor loses on these windows")
    return lines


def at_an_end(racer: Mapping[str, Any]) -> bool:
    """Say whether the best learning rate is the least or the greatest that was tried: tuning then ended too early."""
    tried = [float(lr) for lr in racer["curve"]]
    return not min(tried) < racer["best"]["lr"] < max(tried)


def verdicts(race: Mapping[str, Any]) -> dict[tuple[str, str], Verdict]:
    """Return the verdict on every pair, the better median first."""
    pairs = itertools.combinations(by_median(race), 2)
    return {(a, b): verdict(gaps(race, a), gaps(race, b)) for a, b in pairs}


def verdict_lines(race: Mapping[str, Any]) -> list[str]:
    """Return one sentence per pair."""
    lines = []
    for (first, second), found in verdicts(race).items():
        a, b = RACERS[first].title, RACERS[second].title
        seeds = f"smaller loss on {found.wins} of {found.seeds} seeds (chance {found.chance:.2g})"
        lines.append(f"  {a} against {b}: {seeds}; " + (f"{a} is better" if found.claimed else "no difference claimed"))
    return lines


# ---- What it costs ----------------------------------------------------------------------------------------


def by_look(racer: Mapping[str, Any]) -> list[list[float]]:
    """Return the held-out losses [look][seed]; infinite where the run has diverged."""
    return [[math.inf if v is None else v for v in column] for column in zip(*racer["held_out"], strict=True)]


def steps_until(race: Mapping[str, Any], name: str, target: float) -> int | None:
    """Return after how many steps the median curve is first at or below `target`; None if it never is."""
    racer = race["racers"][name]
    looks = zip(racer["looks"], by_look(racer), strict=True)
    return next((step for step, losses in looks if statistics.median(losses) <= target), None)


def price_lines(race: Mapping[str, Any], times: Mapping[str, Any], against: str = "adamw") -> list[str]:
    """Return what each racer needs to reach the final median loss of `against`: steps, operations and time.

    times: of this task, as `races.times` returns them.
    """
    target = statistics.median(finals(race["racers"][against]))
    whole = _price(race, times, against, race["steps"])
    lines = [f"  to reach {RACERS[against].title}'s final loss:  steps   operations    time"]
    for name in by_median(race):
        steps = steps_until(race, name, target)
        if steps is None:
            lines.append(f"  {RACERS[name].title:28}{'not within the race':>28}")
            continue
        operations, seconds = (mine / its for mine, its in zip(_price(race, times, name, steps), whole, strict=True))
        lines.append(f"  {RACERS[name].title:28}{steps / race['steps']:6.2f}{operations:13.2f}{seconds:8.2f}")
    return lines


def _price(race: Mapping[str, Any], times: Mapping[str, Any], name: str, steps: int) -> tuple[float, float]:
    return steps * sum(race["racers"][name]["flops"].values()), steps * times[name]["median"]


# ---- Runs without tuning ----------------------------------------------------------------------------------


def stored_runs(task: Task, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return runs at settings that were given, as plain data."""
    return {
        "task": task.name,
        "batch": task.batch,
        "steps": task.steps,
        "floor": task.floor() if task.floor else None,
        "runs": [outcome.stored() for outcome in outcomes],
    }


def run_lines(found: Mapping[str, Any], rows: int = 6) -> list[str]:
    """Return the held-out losses along the way, one column per optimizer, medians over seeds."""
    by_name: dict[str, list[Any]] = {}
    for run in found["runs"]:
        by_name.setdefault(run["setting"]["optimizer"], []).append(run)
    floor = found["floor"]
    what = "held-out loss" if floor is None else f"gap to the floor of {floor:.3f} nats per letter"
    lines = [f"{found['task']}, {what}", "    step" + "".join(f"{RACERS[name].title:>10}" for name in by_name)]
    looks = found["runs"][0]["steps"]
    for n in sorted({round((len(looks) - 1) * row / (rows - 1)) for row in range(rows)}):
        losses = (statistics.median(run["held_out"][n] for run in runs) for runs in by_name.values())
        lines.append(f"{looks[n]:8}" + "".join(f"{loss - (floor or 0.0):10.2f}" for loss in losses))
    return lines


def stored_settings(task: str) -> dict[str, Setting]:
    """Return {optimizer: the setting that won} of a stored race. Raises UsageError if it is not there, or not whole."""
    racers = results.load(f"race_{task}")["racers"]
    if absent := [name for name in RACERS if name not in racers]:
        raise UsageError(f"book/results/race_{task}.json is a race without {absent[0]}; `make bench` takes it again.")
    return {name: Setting(**racer["best"]) for name, racer in racers.items()}


def stored_races() -> dict[str, dict[str, Any]]:
    """Return {task: race} for every race in book/results, in the order of TASKS."""
    paths = {name: results.FOLDER / f"race_{name}.json" for name in TASKS}
    return {name: results.load(path.stem) for name, path in paths.items() if path.exists()}


# ---- For figures ------------------------------------------------------------------------------------------


def rate_curves(race: Mapping[str, Any]) -> dict[str, Any]:
    """Return optimizer -> (learning rates, least median loss there), where it is finite."""
    curves = {}
    for name, racer in race["racers"].items():
        found = [(float(lr), loss) for lr, loss in racer["curve"].items() if loss is not None]
        if found:
            curves[RACERS[name].title] = tuple(zip(*found, strict=True))
    return curves


def gap_curves(race: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return optimizer -> (steps, median gap), and optimizer -> (steps, least gap, greatest gap)."""
    curves, bands, floor = {}, {}, race["floor"] or 0.0
    for name in by_median(race):
        racer = race["racers"][name]
        columns = [[loss - floor for loss in losses] for losses in by_look(racer)]
        curves[RACERS[name].title] = (racer["looks"], [statistics.median(column) for column in columns])
        bands[RACERS[name].title] = (racer["looks"], [min(c) for c in columns], [max(c) for c in columns])
    return curves, bands


def image_lines(races: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return results and verdicts on every set of images whose race is stored, and what to do about the others."""
    lines = []
    for name in SOURCES:
        if name in races:
            lines += result_lines(races[name]) + verdict_lines(races[name])
        else:
            lines += not_run_lines(name)
    return lines
