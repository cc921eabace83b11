"""What chapter 4's races found, as lines and as numbers for its figures. Nothing here measures anything.

Every number is a median over seeds, with [least, greatest] after it. Gaps are losses above the floor, in nats per
letter. A difference is claimed as `sweep.verdict` says: on every seed, and at least 5 of them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from distmuon.launch import UsageError
from muonbook.ch04.search_space import CANDIDATES, Setting, ends, title
from muonbook.ch04.sweep import Verdict, span, verdict
from muonbook.ch04.tasks import TASKS
from muonbook.measure import results

# ---- A race -----------------------------------------------------------------------------------------------


def finals(racer: Mapping[str, Any]) -> list[float]:
    """Return the final held-out loss of every seed; infinite where the run diverged."""
    return by_look(racer)[-1]


def floors(race: Mapping[str, Any]) -> list[float]:
    """Return the floor of every seed; 0 where none is known."""
    return race["floor"] or [0.0] * len(race["seeds"])


def gaps(race: Mapping[str, Any], name: str, usual: bool = False) -> list[float]:
    """Return final losses over the floor, where there is one. usual: at the best setting with the usual momentum."""
    racer = race["racers"][name]
    return _above(race, finals(racer["usual"] if usual else racer))


def ngram_gaps(race: Mapping[str, Any]) -> dict[int, list[float]]:
    """Return order -> gaps of the model that counts so many letters, by seed."""
    return {int(order): _above(race, losses) for order, losses in race["ngrams"].items()}


def gaps_by_look(race: Mapping[str, Any], name: str) -> list[list[float]]:
    """Return the gaps [look][seed] along the way."""
    return [_above(race, losses) for losses in by_look(race["racers"][name])]


def _above(race: Mapping[str, Any], losses: Sequence[float]) -> list[float]:
    return [loss - floor for loss, floor in zip(losses, floors(race), strict=True)]


def by_median(race: Mapping[str, Any]) -> list[str]:
    """Return the racers' names, the least median first."""
    return sorted(race["racers"], key=lambda name: statistics.median(gaps(race, name)))


def result_lines(race: Mapping[str, Any], digits: int = 3) -> list[str]:
    """Return how many settings were tried, the best ones, and what they reached on the fresh seeds."""
    seeds = len(race["seeds"])
    measure = "gap to the floor" if race["floor"] is not None else "held-out loss"
    lines = [
        f"{race['task']}, {race['steps']} steps of {race['batch']}: {measure}, median [range] of {seeds} fresh seeds",
        f"{'right':>38}{'tried':>7}{'lr':>9}{'others':>8}{'decay':>7}{'momentum':>10}{'beta 2':>8}",
    ]
    wide = max(6, *(len(title(name)) + 1 for name in race["racers"]))
    lines[1] = " " * (wide - 6) + lines[1]
    for name in by_median(race):
        racer = race["racers"][name]
        right = f"{statistics.median(racer['accuracy']):.1%}"
        lines.append(f"  {title(name):{wide}}{span(gaps(race, name), digits):24}{right:>6}{_setting_cells(racer)}")
        if found := at_an_end(racer):
            lines.append(f"  {title(name)} stands at an end of its grid ({', '.join(found)}): tuning stopped too early")
    if race["floor"] is not None:
        floor = statistics.median(race["floor"])
        lines.append(f"  floor {floor:.3f} nats per letter: what the best predictor loses on the median seed's windows")
    return lines


def _setting_cells(racer: Mapping[str, Any]) -> str:
    """Return how many were tried, and the best: rate, the others' over it, decay, momentum or first beta, second."""
    setting = Setting(**racer["best"])
    beta = f"{setting.second_beta:8g}" if setting.optimizer == "adamw" else ""
    rates = f"{setting.lr:9.3g}{setting.others:8.2g}"
    return f"{racer['settings']:7d}{rates}{setting.weight_decay:7g}{setting.momentum:10g}{beta}"


def at_an_end(racer: Mapping[str, Any]) -> list[str]:
    """Return what of the best setting is the least or the greatest that was tried: tuning then ended too early."""
    return ends({name: tuple(values) for name, values in racer["grid"].items()}, Setting(**racer["best"]))


def verdicts(race: Mapping[str, Any]) -> dict[tuple[str, str], Verdict]:
    """Return the verdict on every pair, the better median first."""
    pairs = itertools.combinations(by_median(race), 2)
    return {(a, b): verdict(gaps(race, a), gaps(race, b)) for a, b in pairs}


def verdict_lines(race: Mapping[str, Any]) -> list[str]:
    """Return one sentence per pair."""
    lines = []
    for (first, second), found in verdicts(race).items():
        a, b = title(first), title(second)
        seeds = f"smaller loss on {found.wins} of {found.seeds} seeds (chance {found.chance:.2g})"
        lines.append(f"  {a} against {b}: {seeds}; " + (f"{a} is better" if found.claimed else "no difference claimed"))
    return lines


# ---- What it costs ----------------------------------------------------------------------------------------


def by_look(racer: Mapping[str, Any]) -> list[list[float]]:
    """Return the held-out losses [look][seed]; infinite where the run has diverged."""
    return [[math.inf if v is None else v for v in column] for column in zip(*racer["held_out"], strict=True)]


def steps_until(race: Mapping[str, Any], name: str, target: float) -> int | None:
    """Return after how many steps the median gap is first at or below `target`; None if it never is."""
    looks = zip(race["racers"][name]["looks"], gaps_by_look(race, name), strict=True)
    return next((step for step, gaps in looks if statistics.median(gaps) <= target), None)


def to_reach(race: Mapping[str, Any], name: str, against: str = "adamw") -> dict[str, float] | None:
    """Return which share of the steps and operations of `against` takes `name` to its final median gap; None if none.

    Median curves are compared, look by look.
    """
    steps = steps_until(race, name, statistics.median(gaps(race, against)))
    if steps is None:
        return None
    mine, its = (sum(race["racers"][one]["flops"].values()) for one in (name, against))
    share = steps / race["steps"]
    return {"steps": share, "operations": share * mine / its}


def prices(race: Mapping[str, Any], times: Mapping[str, Any], name: str, against: str = "adamw") -> dict[str, float]:
    """Return what a racer needs to reach the final median gap of `against`, whose own run is 1, or {} if it does not.

    times: of this task, as `sweep.times` returns them.
    """
    share = to_reach(race, name, against)
    if share is None:
        return {}
    seconds = share["steps"] * times[name]["median"] / times[against]["median"]
    return {"steps": share["steps"], "operations": share["operations"], "time": seconds}


def price_lines(race: Mapping[str, Any], times: Mapping[str, Any], against: str = "adamw") -> list[str]:
    """Return `prices` of all racers."""
    lines = [f"  to reach {title(against)}'s final loss:  steps   operations    time"]
    for name in by_median(race):
        told = f"{'not within the race':>28}"
        if price := prices(race, times, name, against):
            told = "{steps:6.2f}{operations:13.2f}{time:8.2f}".format_map(price)
        lines.append(f"  {title(name):28}{told}")
    return lines


# ---- Runs without tuning ----------------------------------------------------------------------------------


def run_lines(found: Mapping[str, Any], rows: int = 6) -> list[str]:
    """Return the held-out losses along the way, one column per optimizer, medians over seeds."""
    by_name: dict[str, list[Any]] = {}
    for run in found["runs"]:
        by_name.setdefault(run["setting"]["optimizer"], []).append(run)
    floor = dict(zip(found["seeds"], floors(found), strict=True))
    what = "held-out loss" if found["floor"] is None else "gap to the floor, in nats per letter"
    wide = max(10, *(len(title(name)) + 2 for name in by_name))
    lines = [f"{found['task']}, {what}", "    step" + "".join(f"{title(name):>{wide}}" for name in by_name)]
    looks = found["runs"][0]["steps"]
    for n in sorted({round((len(looks) - 1) * row / (rows - 1)) for row in range(rows)}):
        above = (
            statistics.median(run["held_out"][n] - floor[run["seed"]] for run in runs) for runs in by_name.values()
        )
        lines.append(f"{looks[n]:8}" + "".join(f"{gap:{wide}.2f}" for gap in above))
    return lines


def stored_settings(task: str) -> dict[str, Setting]:
    """Return {optimizer: the setting that won} of a stored race. Raises UsageError if it is not there, or not whole."""
    racers = results.load(f"race_{task}")["racers"]
    if absent := [name for name in CANDIDATES if name not in racers]:
        raise UsageError(f"book/results/race_{task}.json is a race without {absent[0]}; `make bench` takes it again.")
    return {name: Setting(**racer["best"]) for name, racer in racers.items()}


def stored_races() -> dict[str, dict[str, Any]]:
    """Return {task: race} for every race in book/results, in the order of TASKS."""
    paths = {name: results.FOLDER / f"race_{name}.json" for name in TASKS}
    return {name: results.load(path.stem) for name, path in paths.items() if path.exists()}
