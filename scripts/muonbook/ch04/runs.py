"""A trial: one run on the language, and everything in which it may differ from the race's.

Studies ask a `Lab` for trials. It deals those that it does not know yet out over the ranks, and remembers them: the
studies have many in common, such as Muon at its best on the race's seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from distmuon.launch import World
from muonbook.ch03.single_device import rms, spectral_norm
from muonbook.ch04 import tasks
from muonbook.ch04.baselines import RACERS, Setting, by_algorithm, muon_and_adamw
from muonbook.ch04.sweep import beyond, dealt_back
from muonbook.ch04.training import Run, look_at, train

MATCHED = 0.2  # the RMS of Muon's update (`muon.scale`)
UP, OUT = "blocks.0.up.weight", "blocks.1.out.weight"  # [256, 64] and [64, 64]: the watched matrices
ROUTES = {  # which matrices go to Muon -> the modules that join the hidden ones
    "hidden": (),
    "hidden + embeddings": ("tokens", "positions"),
    "hidden + head": ("head",),
    "all matrices": ("tokens", "positions", "head"),
}
Name = TypeVar("Name")


@dataclass(frozen=True)
class Trial:
    """One run on the language.

    rms: of Muon's update. route: one of ROUTES. grammar_seed: of another grammar. before: the trial whose weights this
    one starts from, instead of fresh ones.
    """

    setting: Setting
    seed: int
    steps: int
    batch: int = 16
    rms: float = MATCHED
    route: str = "hidden"
    grammar_seed: int | None = None
    before: Trial | None = None

    @property
    def task(self) -> tasks.Task:
        return tasks.speech(self.grammar_seed, self.batch, self.steps)

    def at(self, lr: float, seed: int) -> Trial:
        """Return this trial at another learning rate and seed; what it starts from has its seed too."""
        before = None if self.before is None else self.before.at(self.before.setting.lr, seed)
        return replace(self, setting=self.setting.at(lr), seed=seed, before=before)

    def optimizers(self, model: nn.Module, setting: Setting) -> list[Optimizer]:
        """Return the optimizers, stepped one after the other. SGD and AdamW know neither `rms` nor `route`."""
        if setting.optimizer != "muon":
            return RACERS[setting.optimizer].build(model, setting)
        muon, adamw = muon_and_adamw(*routed(model, self.route), setting)
        set_rms(muon, self.rms)
        return [muon, adamw]


def routed(model: nn.Module, route: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (matrices for Muon, all else for AdamW) on one of ROUTES."""
    hidden, rest = by_algorithm(model)
    joining = {id(p) for name in ROUTES[route] for p in model.get_submodule(name).parameters()}
    return hidden + [p for p in rest if id(p) in joining], [p for p in rest if id(p) not in joining]


def set_rms(muon: Optimizer, value: float) -> None:
    """Let updates that are matched to an RMS of 0.2 have another one, and decay as much as before per step.

    The step is lr (0.2 sqrt(max(A, B)) O + decay W): with lr scaled by value / 0.2 and decay by the inverse, only the
    first part changes (Moonlight, table 8).
    """
    for group in muon.param_groups:
        group["lr"] *= value / MATCHED
        group["weight_decay"] *= MATCHED / value


class Finding(NamedTuple):
    """What is kept of a run.

    steps: when it was looked at, the end included. gaps: loss above the floor then, in nats; infinite once the run has
    diverged. spectral, rms: of the matrix UP.
    """

    steps: list[int]
    gaps: list[float]
    spectral: list[float]
    rms: list[float]

    @property
    def gap(self) -> float:
        return self.gaps[-1]


Weights = dict[str, Tensor]


def carry_out(trial: Trial, start: Weights | None = None) -> tuple[Finding, Weights]:
    """Train; return what is kept, and the weights after the last step. start: the weights of `trial.before`."""
    task = trial.task
    model = task.fresh_model(trial.seed)
    if start is not None:
        model.load_state_dict(start)
    looks, norms = look_at(task.steps), []

    def watch(run: Run, step: int) -> None:
        if step in looks:
            weight = run.model.get_parameter(UP).detach()
            sound = bool(weight.isfinite().all())
            norms.append((spectral_norm(weight), rms(weight)) if sound else (math.inf, math.inf))

    outcome = train(task, trial.setting, trial.seed, trial.optimizers, model, watch)
    norms += [(math.inf, math.inf)] * (len(looks) - len(norms))
    assert task.floor is not None
    gaps = [loss - task.floor() for loss in outcome.held_out]
    found = Finding(looks, gaps, [spectral for spectral, _ in norms], [size for _, size in norms])
    return found, {name: weight.detach().clone() for name, weight in model.state_dict().items()}


class Lab:
    """Where trials are carried out. All its methods are collective: every rank calls them, and gets everything."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.known: dict[Trial, Finding] = {}
        self.weights: dict[Trial, Weights] = {}  # of those that others start from

    def find(self, trials: Sequence[Trial]) -> list[Finding]:
        """Return what was found in each of these trials."""
        wanted = dict.fromkeys(trials)
        before = dict.fromkeys(t.before for t in wanted if t.before is not None)
        for trial, (found, weights) in self._dealt([t for t in before if t not in self.weights]).items():
            self.known[trial], self.weights[trial] = found, weights
        for trial, (found, _) in self._dealt([t for t in wanted if t not in self.known], keep=False).items():
            self.known[trial] = found
        return [self.known[trial] for trial in trials]

    def gaps(self, trials: Sequence[Trial]) -> list[float]:
        return [found.gap for found in self.find(trials)]

    def _dealt(self, trials: Sequence[Trial], keep: bool = True) -> dict[Trial, tuple[Finding, Weights]]:
        """Carry trials out; those that take equally long stand together, so that all ranks get some. keep: weights."""
        todo = sorted(trials, key=lambda t: (t.steps, t.batch, t.setting.optimizer))
        mine = []
        for trial in todo[self.world.rank :: self.world.size]:
            found, weights = carry_out(trial, None if trial.before is None else self.weights[trial.before])
            mine.append((found, weights if keep else {}))
        return dict(zip(todo, dealt_back(self.world, mine, len(todo)), strict=True))


# ---- Retuning ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retuned:
    """What retuning found. best: the trial at the best learning rate. curve: learning rate -> median gap."""

    best: Trial
    curve: dict[float, float]

    def stored(self) -> dict[str, Any]:
        return {"lr": self.best.setting.lr, "lrs": list(self.curve), "medians": list(self.curve.values())}


def retune(lab: Lab, trials: Mapping[Name, Trial], seeds: Sequence[int], farthest: int) -> dict[Name, Retuned]:
    """Tune the learning rate of every trial: half, once and twice its own, and on while the best one is at an end.

    farthest: how often to go on, at most. Everything else of a setting stays as it was tuned for the race.
    """
    curves: dict[Name, dict[float, float]] = {name: {} for name in trials}
    todo = {name: [trial.setting.lr * factor for factor in (0.5, 1, 2)] for name, trial in trials.items()}
    for _ in range(farthest + 1):
        points = [(name, lr) for name, lrs in todo.items() for lr in lrs]
        gaps = iter(lab.gaps([trials[name].at(lr, seed) for name, lr in points for seed in seeds]))
        for name, lr in points:
            curves[name][lr] = statistics.median(next(gaps) for _ in seeds)
        todo = {name: onward for name, curve in curves.items() if (onward := beyond(curve))}
        if not todo:
            break
    return {name: Retuned(_at_best(trials[name], curve), dict(sorted(curve.items()))) for name, curve in curves.items()}


def _at_best(trial: Trial, curve: Mapping[float, float]) -> Trial:
    return trial.at(min(curve, key=lambda lr: curve[lr]), trial.seed)


def state_of(optimizers: Sequence[Optimizer], parameter: nn.Parameter) -> tuple[Tensor, dict[str, Any]]:
    """Return a parameter's momentum, [A, B], and the group it is in: its learning rate is that of the last step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                state = optimizer.state[parameter]
                return state["exp_avg" if "exp_avg" in state else "momentum_buffer"], group
    raise ValueError(f"no optimizer moves this parameter of shape {tuple(parameter.shape)}.")
