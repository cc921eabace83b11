"""A fair sweep: tune everybody on some seeds, then race the best settings on seeds that nobody was tuned on.

Best settings are chosen by their median over the tuning seeds. Judging them on those same seeds would favour whoever
had most settings to be lucky with, so the race has seeds of its own. Runs are shared out over the ranks of a world.

A loss after so many steps is half of an answer: a step of Muon is dearer. So three prices are taken of what the best
settings reach: steps, floating-point operations as torch counts them, and time against AdamW's step in the same run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from distmuon.launch import World
from muonbook.ch04.tasks import LearningTask
from muonbook.ch04.training import CANDIDATES, Outcome, Setting, Training, started, train
from muonbook.measure.results import spread
from muonbook.measure.turns import take_turns

TUNING_SEEDS, RACE_SEEDS = range(1000, 1003), range(8)
FARTHEST = 6  # learning rates beyond the first guess, at most: then the best is at no end because there is none

Job = tuple[Setting, int]  # a setting and a seed
Runner = Callable[[Sequence[Job]], list[Outcome]]
Curve = dict[float, float]  # learning rate -> loss, in rising order
Name = TypeVar("Name", bound=Hashable)
Asked = TypeVar("Asked")
Done = TypeVar("Done")


# ---- Learning rates ---------------------------------------------------------------------------------------


def try_rates(
    first: Mapping[Name, Sequence[float]],
    losses: Callable[[Sequence[tuple[Name, float]]], Sequence[float]],
    farthest: int,
) -> dict[Name, Curve]:
    """Try the first learning rates of everybody, then go on beyond either end while the best is at that end.

    losses: (name, learning rate) pairs -> the loss of each, in the same order. farthest: how often to go on, at most.
    """
    curves: dict[Name, Curve] = {name: {} for name in first}
    todo: Mapping[Name, Sequence[float]] = first
    for _ in range(farthest + 1):
        points = [(name, lr) for name, lrs in todo.items() for lr in lrs]
        for (name, lr), loss in zip(points, losses(points), strict=True):
            curves[name] = dict(sorted({**curves[name], lr: loss}.items()))
        todo = {name: further for name, curve in curves.items() if (further := beyond(curve))}
        if not todo:
            break
    return curves


def beyond(curve: Curve) -> list[float]:
    """Return the learning rate beyond the end at which the best one stands; none if it stands between others."""
    best = best_of(curve)
    return [2 * best] if best == max(curve) else [best / 2] if best == min(curve) else []


def best_of(curve: Mapping[Name, float]) -> Name:
    """Return the learning rate, or whatever else the losses belong to, with the least loss."""
    return min(curve, key=lambda name: curve[name])


# ---- Tuning -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """What tuning one optimizer found. tried: every outcome. best: the setting with the least median."""

    tried: list[Outcome]
    best: Setting

    @classmethod
    def of(cls, tried: list[Outcome]) -> Tuned:
        return cls(tried, best_of(medians(tried)))

    def medians(self) -> dict[Setting, float]:
        return medians(self.tried)

    def curve(self) -> Curve:
        """Return learning rate -> the least median of any setting there, in rising order."""
        curve: Curve = {}
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
    candidate, seeds = CANDIDATES[name], list(seeds)
    tried: list[Outcome] = []

    def losses(points: Sequence[tuple[str, float]]) -> list[float]:
        tried.extend(run([(s, seed) for _, lr in points for s in candidate.settings(name, lr) for seed in seeds]))
        curve = Tuned.of(tried).curve()
        return [curve[lr] for _, lr in points]

    try_rates({name: candidate.lrs}, losses, FARTHEST)
    return Tuned.of(tried)


# ---- On all ranks -----------------------------------------------------------------------------------------


def shared_out(world: World, jobs: Sequence[Asked], do: Callable[[Asked], Done]) -> list[Done]:
    """Do all jobs, each rank every size-th of them; return on every rank what came of all, in their order. Collective.

    `do` is called on the rank that has the job, so it must not itself be collective.
    """
    mine = [do(job) for job in jobs[world.rank :: world.size]]
    if world.size == 1:
        return mine
    everybody: list[list[Done]] = [[] for _ in range(world.size)]
    torch.distributed.all_gather_object(everybody, mine)
    return [everybody[n % world.size][n // world.size] for n in range(len(jobs))]


def runner(world: World, task: LearningTask) -> Runner:
    """Return what runs jobs on all ranks of `world`. All ranks get all outcomes."""
    return lambda jobs: shared_out(world, jobs, lambda job: train(task, *job))


# ---- The race ---------------------------------------------------------------------------------------------


def race(
    world: World,
    task: LearningTask,
    names: Sequence[str],
    tuning: Iterable[int] = TUNING_SEEDS,
    seeds: Iterable[int] = RACE_SEEDS,
) -> dict[str, Any]:
    """Tune the named optimizers on `task` and race the best settings; return what is kept, as plain data. Collective.

    tuning, seeds: those that everybody is tuned on, and those that everybody races on.
    """
    run, seeds = runner(world, task), list(seeds)
    tuned = {name: tune(name, run, tuning) for name in names}
    outcomes = run([(tuned[name].best, seed) for name in names for seed in seeds])
    racers = {
        name: _stored(tuned[name], outcomes[n * len(seeds) :][: len(seeds)]) | {"flops": flops(task, tuned[name].best)}
        for n, name in enumerate(names)
    }
    return described(task) | {"racers": racers}


def described(task: LearningTask) -> dict[str, Any]:
    """Return what is kept of the task."""
    floor = task.floor() if task.floor else None
    return {"task": task.name, "batch": task.batch, "steps": task.steps, "floor": floor}


def _stored(tuned: Tuned, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return what is kept of one optimizer: infinite losses as None, which JSON knows."""
    return {
        "best": asdict(tuned.best),
        "settings": len(tuned.medians()),
        "runs": len(tuned.tried),
        "curve": {f"{lr:g}": _finite(loss) for lr, loss in tuned.curve().items()},
        "seeds": [outcome.seed for outcome in outcomes],
        "looks": outcomes[0].steps,
        "held_out": [[_finite(loss) for loss in outcome.held_out] for outcome in outcomes],
        "accuracy": [outcome.accuracy for outcome in outcomes],
    }


def _finite(loss: float) -> float | None:
    return round(loss, 6) if math.isfinite(loss) else None


# ---- What a step costs ------------------------------------------------------------------------------------


def flops(task: LearningTask, setting: Setting) -> dict[str, int]:
    """Return the floating-point operations of one step: {"model": forward and backward, "optimizer": its products}.

    Counted by torch, which counts matrix products alone.
    """
    run = started(task, setting, seed=0)
    with FlopCounterMode(display=False) as gradients:
        run.loss_and_gradients(0)
    with FlopCounterMode(display=False) as whole:
        run.step(0)
    return {
        "model": gradients.get_total_flops(),
        "optimizer": whole.get_total_flops() - gradients.get_total_flops(),
    }


def times(task: LearningTask, best: Mapping[str, Setting], rounds: int = 40) -> dict[str, dict[str, Any]]:
    """Return {name: spread of the seconds of a step, in units of the median step of AdamW in this run}.

    The optimizers take their turns in random order. Only on a machine that does nothing else does this mean much.
    """

    def next_step(run: Training) -> Callable[[], object]:
        steps = itertools.count()
        return lambda: run.step(min(next(steps), task.steps - 1))

    acts = {name: next_step(started(task, setting, seed=0)) for name, setting in best.items()}
    seconds = take_turns(acts, rounds, warm_up=0)
    usual = statistics.median(seconds["adamw"])
    return {name: spread([one / usual for one in taken]) for name, taken in seconds.items()}


# ---- What may be claimed ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Of two optimizers under the same seeds.

    wins, losses: seeds on which the first has the smaller, greater loss.
    chance: how likely it is that equals come out so lopsided, either way (a two-sided sign test).
    """

    wins: int
    losses: int
    seeds: int
    chance: float

    @property
    def claimed(self) -> bool:
        """Whether a difference may be claimed: one wins on every seed, and there are at least 5."""
        return self.seeds >= 5 and self.seeds in (self.wins, self.losses)


def verdict(first: Sequence[float], second: Sequence[float]) -> Verdict:
    """Compare losses, pair by pair: the same seeds in the same order. A tie is nobody's."""
    from scipy.stats import binomtest  # a second that ranks do not need

    wins = sum(a < b for a, b in zip(first, second, strict=True))
    losses = sum(a > b for a, b in zip(first, second, strict=True))
    chance = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return Verdict(wins, losses, len(first), chance)


def span(values: Sequence[float], digits: int = 3) -> str:
    """Return "median [least, greatest]"."""
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} [{low}, {high}]"
