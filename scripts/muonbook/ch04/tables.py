"""What chapter 4's races found, as lines and as numbers for its figures. Nothing here measures anything.

Every number is a median over seeds, with [least, greatest] after it. Gaps are losses above the floor, in nats per
letter. A difference is claimed as `sweep.verdict` says: on every seed, and at least 5 of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from distmuon.launch import UsageError
from muonbook.ch04.search_space import RACERS, Setting, widened
from muonbook.ch04.studies import MATCHED
from muonbook.ch04.sweep import Verdict, span, verdict
from muonbook.ch04.tasks import TASKS
from muonbook.measure import results

Race = Mapping[str, Any]  # as `sweep.race` returns it


def gaps(race: Race, name: str, usual: bool = False, look: int = -1) -> list[float]:
    """Return the losses of every seed over its floor, where there is one; infinite where a run has diverged.

    usual: at the best setting with the usual momentum. look: when, of the times at which the losses were taken.
    """
    racer = race["racers"][name]["usual"] if usual else race["racers"][name]
    losses = [held_out[look] for held_out in racer["held_out"]]
    floors = race["floor"] or [0.0] * len(losses)
    return [math.inf if loss is None else loss - floor for loss, floor in zip(losses, floors, strict=True)]


def gaps_by_look(race: Race, name: str) -> list[list[float]]:
    """Return the gaps [look][seed] along the way."""
    return [gaps(race, name, look=look) for look in range(len(race["racers"][name]["looks"]))]


def ngram_gap(race: Race, order: int) -> float:
    """Return the median gap of the model that counts so many letters."""
    return median(loss - floor for loss, floor in zip(race["ngrams"][str(order)], race["floor"], strict=True))


def by_median(race: Race) -> list[str]:
    """Return the racers' names, the least median first."""
    return sorted(race["racers"], key=lambda name: median(gaps(race, name)))


def result_lines(race: Race) -> list[str]:
    """Return how many settings were tried, the best ones, and what they reached on the fresh seeds."""
    measure = "gap to the floor" if race["floor"] is not None else "held-out loss"
    wide = max(6, *(len(RACERS[name].title) + 1 for name in race["racers"]))
    task, steps, batch, seeds = race["task"], race["steps"], race["batch"], len(race["seeds"])
    lines = [
        f"{task}, {steps} steps of {batch}: {measure}, median [range] of {seeds} fresh seeds",
        f"{'tried':>{wide + 33}}{'lr':>9}{'others':>8}{'decay':>7}{'momentum':>10}{'beta 2':>8}",
    ]
    for name in by_median(race):
        racer, title = race["racers"][name], RACERS[name].title
        best = Setting(**racer["best"])
        result = f"  {title:{wide}}{span(gaps(race, name)):24}"
        rates = f"{racer['settings']:7d}{best.lr:9.3g}{best.others:8.2g}{best.weight_decay:7g}{best.momentum:10g}"
        lines.append(result + rates + (f"{best.second_beta:8g}" if name == "adamw" else ""))
        if found := at_an_end(racer):
            lines.append(f"  {title} stands at an end of its grid ({', '.join(found)}): tuning stopped too early")
    if race["floor"] is not None:
        floor = median(race["floor"])
        lines.append(f"  floor {floor:.3f} nats per letter: what the best predictor loses on the median seed's windows")
    return lines


def at_an_end(racer: Mapping[str, Any]) -> list[str]:
    """Return what of the best setting is the least or the greatest that was tried: tuning then ended too early."""
    wider = widened(racer["grid"], Setting(**racer["best"]))
    return [name for name, values in racer["grid"].items() if len(values) < len(wider[name])]


def verdicts(race: Race) -> dict[tuple[str, str], Verdict]:
    """Return the verdict on every pair, the better median first."""
    pairs = itertools.combinations(by_median(race), 2)
    return {(a, b): verdict(gaps(race, a), gaps(race, b)) for a, b in pairs}


def verdict_lines(race: Race) -> list[str]:
    """Return one sentence per pair."""
    lines = []
    for (first, second), found in verdicts(race).items():
        a, b = RACERS[first].title, RACERS[second].title
        seeds = f"smaller loss on {found.wins} of {found.seeds} seeds"
        lines.append(f"  {a} against {b}: {seeds}; " + (f"{a} is better" if found.claimed else "no difference claimed"))
    return lines


def changes(found: Mapping[str, Any]) -> list[tuple[str, list[float], list[float]]]:
    """Return what each comparison of these studies changes, and the gaps without and with it, seed by seed.

    found: {study: what `studies` returns of it}, of all of them or of some.
    """
    batch = {(row["optimizer"], row["batch"]): row["gaps"] for row in _rows(found, "batch")}
    decay = {(row["optimizer"], row["steps"], row["weight_decay"]): row["gaps"] for row in _rows(found, "decay")}
    rms, tuned = ({row["rms"]: row["gaps"] for row in _rows(found, "rms", part)} for part in ("rows", "tuned"))
    compared = [
        (f"Muon instead of AdamW, {n} windows a batch", batch["adamw", n], gaps)
        for (name, n), gaps in batch.items()
        if name == "muon"
    ]
    if decay:
        most = max(steps for _, steps, _ in decay)
        compared.append((f"Muon instead of AdamW, {most} steps", decay["adamw", most, 0.1], decay["muon", most, 0.1]))
    for (name, steps, rate), gaps in decay.items():
        if rate:
            what = f"decay {rate} instead of none, {RACERS[name].title}, {steps} steps"
            compared.append((what, decay[name, steps, 0.0], gaps))
    for rows, also in ((rms, ""), (tuned, ", rate tuned anew")):
        for value in sorted(rows.keys() - {MATCHED}):
            compared.append((f"update RMS {value} instead of {MATCHED}{also}", rows[MATCHED], rows[value]))
    routes = _rows(found, "routing")
    return compared + [(f"Muon trains {row['route']}", routes[0]["gaps"], row["gaps"]) for row in routes[1:]]


def _rows(found: Mapping[str, Any], study: str, part: str = "rows") -> Sequence[Mapping[str, Any]]:
    return found[study][part] if study in found else ()


def change_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the comparisons of `changes` as a table: median gaps, and whether a difference may be claimed."""
    lines = [f"{'what we changed':48}{'gap before':>10}{'after':>8}   smaller on"]
    for what, before, after in changes(found):
        judged = verdict(after, before)
        seeds = f"{judged.wins} of {judged.seeds}" + (", claimed" if judged.claimed else "")
        lines.append(f"{what:48}{median(before):10.3f}{median(after):8.3f}   {seeds}")
    return lines


def to_reach(race: Race, name: str = "muon", against: str = "adamw") -> dict[str, Any]:
    """Return which share of the steps and operations of `against` takes `name` to its final median gap; None: never.

    Median curves are compared, look by look.
    """
    target = median(gaps(race, against))
    looks = zip(race["racers"][name]["looks"], gaps_by_look(race, name), strict=True)
    steps = next((step for step, found in looks if median(found) <= target), None)
    if steps is None:
        return {"steps": None, "operations": None}
    mine, its = (sum(race["racers"][one]["flops"].values()) for one in (name, against))
    share = steps / race["steps"]
    return {"steps": share, "operations": share * mine / its}


def summary(race: Race) -> dict[str, Any]:
    """Return the medians of gaps (of losses, where no floor is known), the pairs, and what it takes to catch AdamW."""
    return {
        "median": {name: median(gaps(race, name)) for name in race["racers"]},
        "pairs": {f"{a}_{b}": found.as_data() for (a, b), found in verdicts(race).items()},
        "to_adamw": to_reach(race),
    }


def stored_settings(task: str) -> dict[str, Setting]:
    """Return {optimizer: the setting that won} of a stored race. Raises UsageError if it is not there, or not whole."""
    racers = results.load(f"race_{task}")["racers"]
    if absent := [name for name in ("sgd", "adamw", "muon") if name not in racers]:
        raise UsageError(f"book/results/race_{task}.json is a race without {absent[0]}; `make bench` takes it again.")
    return {name: Setting(**racer["best"]) for name, racer in racers.items()}


def stored_races() -> dict[str, dict[str, Any]]:
    """Return {task: race} for every race in book/results, in the order of TASKS."""
    names = {name: f"race_{name}" for name in TASKS}
    return {name: results.load(file) for name, file in names.items() if (results.FOLDER / f"{file}.json").exists()}
