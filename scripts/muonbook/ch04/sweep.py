"""A fair sweep: tune everybody on some seeds, then race the best settings on seeds that nobody was tuned on.

Best settings are chosen by their median over the tuning seeds. Judging them on those same seeds would favour whoever
had most settings to be lucky with, so the race has seeds of its own. Runs are dealt out over the ranks of a world.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from distmuon.launch import World
from muonbook.ch04.baselines import RACERS, Setting
from muonbook.ch04.tasks import Task
from muonbook.ch04.training import Outcome, train

TUNING_SEEDS, RACE_SEEDS = range(1000, 1003), range(8)
FARTHEST = 6  # learning rates beyond the first guess, at most: then the best is at no end because there is none

Job = tuple[Setting, int]  # a setting and a seed
Runner = Callable[[Sequence[Job]], list[Outcome]]


@dataclass(frozen=True)
class Tuned:
    """What tuning one optimizer found. tried: every outcome. best: the setting with the least median."""

    tried: list[Outcome]
    best: Setting

    @classmethod
    def of(cls, tried: list[Outcome]) -> Tuned:
        found = medians(tried)
        return cls(tried, min(found, key=lambda setting: found[setting]))

    def medians(self) -> dict[Setting, float]:
        return medians(self.tried)

    def curve(self) -> dict[float, float]:
        """Return learning rate -> the least median of any setting there, in rising order."""
        curve: dict[float, float] = {}
        for setting, loss in self.medians().items():
            curve[setting.lr] = min(loss, curve.get(setting.lr, math.inf))
        return dict(sorted(curve.items()))


def medians(outcomes: Iterable[Outcome]) -> dict[Setting, float]:
    """Return setting -> median final held-out loss over its seeds."""
    by_setting: dict[Setting, list[float]] = {}
    for outcome in outcomes:
        by_setting.setdefault(outcome.setting, []).append(outcome.final)
    return {setting: statistics.median(losses) for setting, losses in by_setting.items()}


def tune(name: str, run: Runner, seeds: Iterable[int] = TUNING_SEEDS) -> Tuned:
    """Try all settings of one optimizer; go on beyond either end of its learning rates while the best is at that end.

    run: trains settings with seeds, and returns the outcomes in the same order.
    """
    racer, seeds = RACERS[name], list(seeds)
    todo = list(racer.lrs)
    tried: list[Outcome] = []
    for _ in range(FARTHEST + 1):
        tried += run([(setting, seed) for lr in todo for setting in racer.settings(name, lr) for seed in seeds])
        todo = beyond(Tuned.of(tried).curve())
        if not todo:
            break
    return Tuned.of(tried)


def beyond(curve: Mapping[float, float]) -> list[float]:
    """Return the learning rate beyond the end at which the best one stands; none if it stands between others."""
    best = min(curve, key=lambda lr: curve[lr])
    return [2 * best] if best == max(curve) else [best / 2] if best == min(curve) else []


def runner(world: World, task: Task) -> Runner:
    """Return what runs jobs on all ranks of `world`, each rank every size-th of them. All ranks get all outcomes."""

    def run(jobs: Sequence[Job]) -> list[Outcome]:
        mine = [train(task, setting, seed) for setting, seed in jobs[world.rank :: world.size]]
        return dealt_back(world, mine, len(jobs))

    return run


def dealt_back(world: World, mine: list[Any], count: int) -> list[Any]:
    """Return what all ranks found, in the order of the jobs that were dealt out one by one. Collective."""
    if world.size == 1:
        return mine
    everybody: list[list[Any]] = [[] for _ in range(world.size)]
    torch.distributed.all_gather_object(everybody, mine)
    return [everybody[n % world.size][n // world.size] for n in range(count)]


def race(world: World, task: Task, names: Sequence[str], tuning: Iterable[int], seeds: Iterable[int]) -> dict[str, Any]:
    """Tune every optimizer, race the best settings; return {name: (Tuned, outcomes by seed)}. Collective."""
    run, seeds = runner(world, task), list(seeds)
    tuned = {name: tune(name, run, tuning) for name in names}
    outcomes = run([(tuned[name].best, seed) for name in names for seed in seeds])
    return {name: (tuned[name], outcomes[n * len(seeds) :][: len(seeds)]) for n, name in enumerate(names)}


# ---- What may be claimed ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Of two optimizers under the same seeds. wins, losses: seeds on which the first has the smaller, greater loss.

    chance: how likely it is that equals come out so lopsided, either way (a two-sided sign test).
    """

    wins: int
    losses: int
    seeds: int
    chance: float

    @property
    def claimed(self) -> bool:
        """Whether a difference may be claimed: the same one wins on every seed, and there are at least 5."""
        return self.seeds >= 5 and self.seeds in (self.wins, self.losses)


def verdict(first: Sequence[float], second: Sequence[float]) -> Verdict:
    """Compare losses, pair by pair: the same seeds in the same order. A tie is nobody's."""
    from scipy.stats import binomtest

    wins = sum(a < b for a, b in zip(first, second, strict=True))
    losses = sum(a > b for a, b in zip(first, second, strict=True))
    chance = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return Verdict(wins, losses, len(first), chance)


def span(values: Sequence[float], digits: int = 3) -> str:
    """Return "median [least, greatest]"."""
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} [{low}, {high}]"


def with_dtype(task: Task, dtype: str) -> Task:
    """Return the task in float32 or float64."""
    return replace(task, dtype=getattr(torch, dtype))
