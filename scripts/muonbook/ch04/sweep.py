"""A fair sweep: tune all optimizers alike on some seeds, then race their best settings on other seeds.

Tuning is by halving: every setting runs on the first tuning seed, the best eighth of them (and the best at every
learning rate) on the others too, and the least median of those wins. While it stands at an end of what was tried, the
grid is made wider there. On those same seeds the optimizer with most settings would have most chances to be lucky, so
the race has seeds of its own. Runs are shared out over the ranks of a world.

A loss after so many steps is half of an answer, because a step of Muon costs more. So we also take the floating-point
operations of a step, as torch counts them, and its time compared with AdamW's step in the same run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from distmuon.launch import World
from muonbook.ch04.search_space import RACERS, Grid, Setting, is_usual, settings, widened
from muonbook.ch04.tasks import ORDERS, LearningTask, both_windows, ngram_losses
from muonbook.ch04.training import Outcome, Training, train
from muonbook.measure.interleaved_timing import take_turns
from muonbook.measure.results import spread

TUNING_SEEDS, RACE_SEEDS = range(1000, 1003), range(8)
FARTHEST = 6  # times that a grid is widened, at most: then the best is at no end because there is none
FINALISTS = 8  # one setting of so many is tried on all tuning seeds

Job = tuple[Setting, int]  # a setting and a seed
Runner = Callable[[Sequence[Job]], list[Outcome]]
Curve = dict[float, float]  # learning rate -> loss, in rising order
Name = TypeVar("Name", bound=Hashable)
Asked = TypeVar("Asked")
Done = TypeVar("Done")


# ---- Tuning -----------------------------------------------------------------------------------------------


def try_rates(
    first: Mapping[Name, Sequence[float]],
    losses: Callable[[Sequence[tuple[Name, float, int]]], Sequence[float]],
    seeds: Sequence[int],
    farthest: int,
) -> dict[Name, Curve]:
    """Try the first learning rates of all, then go on beyond either end while the best is at that end.

    losses: (name, learning rate, seed) of each run -> its loss, in the same order. farthest: how often to go
    on, at most. Return for each name its learning rates with the median losses over the seeds.
    """
    curves: dict[Name, Curve] = {name: {} for name in first}
    todo = [(name, lr) for name, lrs in first.items() for lr in lrs]
    for _ in range(farthest + 1):
        found = iter(losses([(*point, seed) for point in todo for seed in seeds]))
        for name, lr in todo:
            curves[name] = dict(sorted({**curves[name], lr: statistics.median(next(found) for _ in seeds)}.items()))
        todo = []
        for name, curve in curves.items():
            best = best_of(curve)
            if best in (min(curve), max(curve)):
                todo.append((name, 2 * best if best == max(curve) else best / 2))
        if not todo:
            break
    return curves


def best_of(losses: Mapping[Name, float]) -> Name:
    """Return the learning rate, or whatever else the losses belong to, with the least loss."""
    return min(losses, key=lambda name: losses[name])


@dataclass(frozen=True)
class Tuned:
    """What tuning one optimizer found.

    grid: what was tried in the end. tried: every outcome. medians: of the settings that ran on all tuning seeds.
    """

    grid: Grid
    tried: list[Outcome]
    medians: dict[Setting, float]

    @property
    def best(self) -> Setting:
        return best_of(self.medians)

    @property
    def usual(self) -> Setting:
        """The best setting with the usual momentum and one learning rate for all parameters."""
        return best_of({setting: loss for setting, loss in self.medians.items() if is_usual(setting)})

    def curve(self) -> Curve:
        """Return learning rate -> the least median of any setting there, in rising order."""
        worst_first = sorted(self.medians.items(), key=lambda one: one[1], reverse=True)
        return dict(sorted({setting.lr: loss for setting, loss in worst_first}.items()))


def medians(outcomes: Iterable[Outcome]) -> dict[Setting, float]:
    """Return setting -> median final held-out loss over its seeds."""
    by_setting: dict[Setting, list[float]] = {}
    for outcome in outcomes:
        by_setting.setdefault(outcome.setting, []).append(outcome.final)
    return {setting: statistics.median(losses) for setting, losses in by_setting.items()}


def tune(name: str, run: Runner, seeds: Iterable[int] = TUNING_SEEDS, rates_alone: bool = False) -> Tuned:
    """Tune one optimizer; see this module for how. rates_alone: its learning rate, and everything else as usual.

    run: trains settings with seeds, and returns the outcomes in the same order.
    """
    first, *others = seeds
    grid = RACERS[name].grid(rates_alone)
    known: dict[Job, Outcome] = {}

    def outcomes(jobs: Sequence[Job]) -> list[Outcome]:
        todo = [job for job in jobs if job not in known]
        known.update(zip(todo, run(todo), strict=True))
        return [known[job] for job in jobs]

    for left in reversed(range(FARTHEST + 1)):
        on_first = medians(outcomes([(setting, first) for setting in settings(name, grid)]))
        final = finalists(on_first)
        found = medians(outcomes([(setting, seed) for setting in final for seed in (first, *others)]))
        wider = widened(grid, best_of(found))
        if wider == grid or not left:
            break
        grid = wider
    return Tuned(grid, list(known.values()), found)


def finalists(losses: Mapping[Setting, float]) -> list[Setting]:
    """Return the best settings, and the best ones of those that are as usual; at every learning rate the best."""
    ranked = sorted(losses, key=lambda setting: losses[setting])
    at_each = {setting.lr: setting for setting in reversed(ranked)}
    groups = (ranked, [setting for setting in ranked if is_usual(setting)])
    chosen = [one for group in groups for one in group[: math.ceil(len(group) / FINALISTS)]]
    return list(dict.fromkeys([*chosen, *at_each.values()]))


# ---- On all ranks -----------------------------------------------------------------------------------------


def shared_out(world: World, jobs: Sequence[Asked], do: Callable[[Asked], Done]) -> list[Done]:
    """Do all jobs, each rank every size-th of them; return on every rank what came of all, in their order. Collective.

    `do` is called on the rank that has the job, so it must not itself be collective.
    """
    mine = [do(job) for job in jobs[world.rank :: world.size]]
    if world.size == 1:
        return mine
    by_rank: list[list[Done]] = [[] for _ in range(world.size)]
    torch.distributed.all_gather_object(by_rank, mine)
    return [by_rank[n % world.size][n // world.size] for n in range(len(jobs))]


def runner(world: World, task: LearningTask) -> Runner:
    """Return what runs jobs on all ranks of `world`. All ranks get all outcomes."""
    return lambda jobs: shared_out(world, jobs, lambda job: train(task, *job))


# ---- The race ---------------------------------------------------------------------------------------------


def race(
    world: World,
    task: LearningTask,
    names: Sequence[str],
    tuning: Sequence[int] = TUNING_SEEDS,
    seeds: Sequence[int] = RACE_SEEDS,
    rates_alone: bool = False,
) -> dict[str, Any]:
    """Tune the named optimizers on `task` and race the best settings; return what is kept, as plain data. Collective.

    tuning, seeds: those that all are tuned on, and those that all race on. rates_alone: see `tune`.
    """
    trained = runner(world, replace(task, tuning=True))
    tuned = {name: tune(name, trained, tuning, rates_alone) for name in names}
    starters = dict.fromkeys(setting for one in tuned.values() for setting in (one.best, one.usual))
    jobs = [(setting, seed) for setting in starters for seed in seeds]
    outcomes = dict(zip(jobs, runner(world, task)(jobs), strict=True))
    racers = {}
    for name, one in tuned.items():
        best, usual = (_stored([outcomes[setting, seed] for seed in seeds]) for setting in (one.best, one.usual))
        racers[name] = {
            "settings": len({outcome.setting for outcome in one.tried}),
            "grid": {field: list(values) for field, values in one.grid.items()},
            "curve": {f"{lr:g}": _finite(loss) for lr, loss in one.curve().items()},
            **best,
            "usual": usual,
            "flops": flops(task, one.best),
        }
    return described(task, seeds) | {"tuning_seeds": list(tuning), "racers": racers}


def described(task: LearningTask, seeds: Sequence[int]) -> dict[str, Any]:
    """Return what is kept of the task, and what is known without training, by seed.

    floor: the best predictor's loss. ngrams: order -> the loss of a model that counts letters.
    """
    known: dict[str, Any] = {"floor": None}
    if task.floor is not None:
        counted = [ngram_losses(*both_windows(task, seed)) for seed in seeds]
        ngrams = {str(order): [losses[order] for losses in counted] for order in ORDERS}
        known = {"floor": [task.floor(seed) for seed in seeds], "ngrams": ngrams}
    return {"task": task.name, "batch": task.batch, "steps": task.steps, "seeds": list(seeds)} | known


def _stored(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what is kept of one setting's runs: infinite losses as None, which JSON knows."""
    return {
        "best": asdict(outcomes[0].setting),
        "looks": outcomes[0].steps,
        "held_out": [[_finite(loss) for loss in outcome.held_out] for outcome in outcomes],
    }


def _finite(loss: float) -> float | None:
    return round(loss, 6) if math.isfinite(loss) else None


# ---- What a step costs ------------------------------------------------------------------------------------


def flops_of(act: Callable[[], object]) -> int:
    """Return the floating-point operations of `act`: of its matrix products, which are all that torch counts."""
    with FlopCounterMode(display=False) as counter:
        act()
    return counter.get_total_flops()


def flops(task: LearningTask, setting: Setting) -> dict[str, int]:
    """Return the operations of one step: {"model": forward and backward, "optimizer": its products}."""
    run = Training(task, setting, seed=0)
    model = flops_of(lambda: run.loss_and_gradients(0))
    return {"model": model, "optimizer": flops_of(lambda: run.step(0)) - model}


def times(task: LearningTask, best: Mapping[str, Setting], rounds: int = 40) -> dict[str, dict[str, Any]]:
    """Return {name: spread of the seconds of a step, in units of the median step of AdamW in this run}.

    The optimizers take their turns in random order. Only on a machine that does nothing else does this mean much.
    """

    def next_step(run: Training) -> Callable[[], object]:
        steps = itertools.count()
        return lambda: run.step(min(next(steps), task.steps - 1))

    acts = {name: next_step(Training(task, setting, seed=0)) for name, setting in best.items()}
    seconds = take_turns(acts, rounds, warm_up=0)
    usual = statistics.median(seconds["adamw"])
    return {name: spread([one / usual for one in taken]) for name, taken in seconds.items()}


# ---- What may be claimed ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Of two optimizers under the same seeds.

    wins, losses: seeds on which the first has the smaller, greater loss.
    """

    wins: int
    losses: int
    seeds: int

    @property
    def claimed(self) -> bool:
        """Whether a difference may be claimed: one wins on every seed, and there are at least 5."""
        return self.seeds >= 5 and self.seeds in (self.wins, self.losses)

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"claimed": self.claimed}


def verdict(first: Sequence[float], second: Sequence[float]) -> Verdict:
    """Compare losses, pair by pair: the same seeds in the same order. A tie counts for neither."""
    pairs = list(zip(first, second, strict=True))
    return Verdict(sum(a < b for a, b in pairs), sum(a > b for a, b in pairs), len(pairs))


def span(values: Sequence[float], digits: int = 3) -> str:
    """Return "median [least, greatest]"."""
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} [{low}, {high}]"
