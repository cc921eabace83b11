"""What there is to see beside the race: one study per question, all on the language.

Every study starts from the settings that the race tuned, changes one thing, and retunes the learning rate wherever the
change could ask for another. Tuned on seeds of their own, reported on the race's; gaps are losses above the floor, in
nats per letter. `measure` runs them; all it returns is plain data, which `tables` prints.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from distmuon.extras.metrics.matrix import rms, spectral_norm
from distmuon.launch import World
from distmuon.optim.param_groups import by_algorithm
from muonbook.ch04 import tasks
from muonbook.ch04.search_space import CANDIDATES, Setting, muon_and_adamw
from muonbook.ch04.studies import spectra
from muonbook.ch04.sweep import RACE_SEEDS, TUNING_SEEDS, Curve, Name, best_of, shared_out, try_rates
from muonbook.ch04.training import Training, look_at, train

MATCHED = 0.2  # the RMS of Muon's update (`muon.scale`)
WATCHED = spectra.WATCHED["up"]  # the matrix whose norms every run keeps
ROUTES = {  # which matrices go to Muon -> the modules that join the hidden ones
    "hidden": (),
    "hidden + embeddings": ("tokens", "positions"),
    "hidden + head": ("head",),
    "all matrices": ("tokens", "positions", "head"),
}
DECAYS = (0.0, 0.1)
PAIR = ("adamw", "muon")

Best = Mapping[str, Setting]  # {"sgd", "adamw", "muon"}: tuned on the language at its default steps
Weights = dict[str, Tensor]


# ---- One run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSpec:
    """One run on the language.

    rms: of Muon's update. route: one of ROUTES. spoken_otherwise: see `tasks.speech`. before: the run whose weights
    this one starts from, instead of fresh ones.
    """

    setting: Setting
    seed: int
    steps: int
    batch: int = 16
    rms: float = MATCHED
    route: str = "hidden"
    spoken_otherwise: bool = False
    before: RunSpec | None = None

    @property
    def task(self) -> tasks.LearningTask:
        return tasks.speech(self.spoken_otherwise, self.batch, self.steps)

    def at(self, lr: float, seed: int) -> RunSpec:
        """Return this run at another learning rate and seed; what it starts from has its seed too."""
        before = None if self.before is None else self.before.at(self.before.setting.lr, seed)
        return replace(self, setting=self.setting.at(lr), seed=seed, before=before)

    def optimizers(self, model: nn.Module, setting: Setting) -> list[Optimizer]:
        """Return the optimizers, stepped one after the other. SGD and AdamW know neither `rms` nor `route`."""
        if setting.optimizer != "muon":
            return CANDIDATES[setting.optimizer].build(model, setting)
        muon, adamw = muon_and_adamw(routed(model, self.route), setting)
        set_rms(muon, self.rms)
        return [muon, adamw]


def routed(model: nn.Module, route: str) -> dict[str, list[nn.Parameter]]:
    """Return {"muon": matrices, "adamw": all else} on one of ROUTES."""
    params = by_algorithm(model)
    joining = {id(p) for name in ROUTES[route] for p in model.get_submodule(name).parameters()}
    return {
        "muon": params["muon"] + [p for p in params["adamw"] if id(p) in joining],
        "adamw": [p for p in params["adamw"] if id(p) not in joining],
    }


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
    diverged. spectral, rms: of the watched matrix.
    """

    steps: list[int]
    gaps: list[float]
    spectral: list[float]
    rms: list[float]

    @property
    def gap(self) -> float:
        return self.gaps[-1]


def carry_out(spec: RunSpec, start: Weights | None = None) -> tuple[Finding, Weights]:
    """Train; return what is kept, and the weights after the last step. start: the weights of `spec.before`."""
    task = spec.task
    model = task.fresh_model(spec.seed)
    if start is not None:
        model.load_state_dict(start)
    looks, norms = look_at(task.steps), []

    def watch(run: Training, step: int) -> None:
        if step in looks:
            weight = run.model.get_parameter(WATCHED).detach()
            sound = bool(weight.isfinite().all())
            norms.append((spectral_norm(weight), rms(weight)) if sound else (math.inf, math.inf))

    outcome = train(task, spec.setting, spec.seed, spec.optimizers, model, watch)
    norms += [(math.inf, math.inf)] * (len(looks) - len(norms))
    assert task.floor is not None
    gaps = [loss - task.floor(spec.seed) for loss in outcome.held_out]
    found = Finding(looks, gaps, [spectral for spectral, _ in norms], [size for _, size in norms])
    return found, {name: weight.detach().clone() for name, weight in model.state_dict().items()}


class RunCache:
    """Carries runs out, each once, and remembers them: the studies have many in common.

    All its methods are collective: every rank calls them, and gets everything.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.known: dict[RunSpec, Finding] = {}
        self.weights: dict[RunSpec, Weights] = {}  # of those that others start from

    def find(self, specs: Sequence[RunSpec]) -> list[Finding]:
        """Return what was found in each of these runs."""
        wanted = dict.fromkeys(specs)
        before = dict.fromkeys(spec.before for spec in wanted if spec.before is not None)
        for spec, (found, weights) in self._carried_out([spec for spec in before if spec not in self.weights]).items():
            self.known[spec], self.weights[spec] = found, weights
        for spec, (found, _) in self._carried_out([spec for spec in wanted if spec not in self.known], False).items():
            self.known[spec] = found
        return [self.known[spec] for spec in specs]

    def gaps(self, specs: Sequence[RunSpec]) -> list[float]:
        return [found.gap for found in self.find(specs)]

    def _carried_out(self, specs: Sequence[RunSpec], keep: bool = True) -> dict[RunSpec, tuple[Finding, Weights]]:
        """Train; those that take equally long stand together, so that all ranks get some. keep: weights."""

        def do(spec: RunSpec) -> tuple[Finding, Weights]:
            found, weights = carry_out(spec, None if spec.before is None else self.weights[spec.before])
            return found, weights if keep else {}

        todo = sorted(specs, key=lambda s: (s.steps, s.batch, s.setting.optimizer))
        return dict(zip(todo, shared_out(self.world, todo, do), strict=True))


# ---- Retuning ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retuned:
    """What retuning found. best: the run at the best learning rate. curve: learning rate -> median gap."""

    best: RunSpec
    curve: Curve

    def stored(self) -> dict[str, Any]:
        return {"lr": self.best.setting.lr, "lrs": list(self.curve), "medians": list(self.curve.values())}


def retune(cache: RunCache, specs: Mapping[Name, RunSpec], seeds: Sequence[int], farthest: int) -> dict[Name, Retuned]:
    """Tune the learning rate of every run: half, once and twice its own, and on while the best one is at an end.

    farthest: how often to go on, at most. Everything else of a setting stays as it was tuned for the race.
    """

    def losses(points: Sequence[tuple[Name, float]]) -> list[float]:
        gaps = iter(cache.gaps([specs[name].at(lr, seed) for name, lr in points for seed in seeds]))
        return [statistics.median(next(gaps) for _ in seeds) for _ in points]

    first = {name: [spec.setting.lr * factor for factor in (0.5, 1, 2)] for name, spec in specs.items()}
    curves = try_rates(first, losses, farthest)
    return {name: Retuned(specs[name].at(best_of(curve), specs[name].seed), curve) for name, curve in curves.items()}


def raced(cache: RunCache, specs: Sequence[RunSpec], seeds: Sequence[int]) -> list[list[Finding]]:
    """Return what was found, [run][seed]."""
    found = cache.find([spec.at(spec.setting.lr, seed) for spec in specs for seed in seeds])
    return [found[n * len(seeds) :][: len(seeds)] for n in range(len(specs))]


def gaps(found: Sequence[Finding]) -> list[float]:
    return [one.gap for one in found]


def _start(best: Best, name: str, size: StudySize) -> RunSpec:
    return RunSpec(best[name], size.seeds[0], size.steps)


def _tuned_rows(
    cache: RunCache, specs: Mapping[tuple[Any, ...], RunSpec], keys: Sequence[str], size: StudySize
) -> list[dict]:
    """Retune and race; return one row each: what it is called, what tuning found, and its gaps by seed."""
    tuned: dict[tuple[Any, ...], Retuned] = retune(cache, specs, size.tuning, size.farthest)
    found = raced(cache, [one.best for one in tuned.values()], size.seeds)
    return [
        dict(zip(keys, name, strict=True)) | one.stored() | {"gaps": gaps(runs)}
        for (name, one), runs in zip(tuned.items(), found, strict=True)
    ]


# ---- The studies ------------------------------------------------------------------------------------------


def finetune(cache: RunCache, best: Best, size: StudySize) -> dict[str, Any]:
    """Pretrain with one optimizer, go on with another on another grammar (Moonlight, table 7)."""
    pretrained = {name: _start(best, name, size) for name in PAIR}
    pairs = {
        (first, second): RunSpec(
            best[second], size.seeds[0], size.finetuning, spoken_otherwise=True, before=pretrained[first]
        )
        for first in PAIR
        for second in PAIR
    }
    rows = _tuned_rows(cache, pairs, ("pretrained", "optimizer"), size)
    before = dict(zip(PAIR, raced(cache, list(pretrained.values()), size.seeds), strict=True))
    return {
        "pretraining_steps": size.steps,
        "steps": size.finetuning,
        "pretrained": {name: gaps(found) for name, found in before.items()},
        "rows": rows,
    }


def update_rms(cache: RunCache, best: Best, size: StudySize) -> dict[str, Any]:
    """Set the RMS of Muon's update, all else unchanged (Moonlight, table 8); then retune the learning rate for each.

    The learning rate is that of AdamW's part too, so what retuning cannot give back is due to their ratio.
    """
    start = _start(best, "muon", size)
    found = raced(cache, [replace(start, rms=level) for level in size.levels], size.seeds)
    rows = [{"rms": level, "gaps": gaps(runs)} for level, runs in zip(size.levels, found, strict=True)]
    tuned = {(level,): replace(start, rms=level) for level in size.retuned_levels}
    return {"lr": start.setting.lr, "rows": rows, "tuned": _tuned_rows(cache, tuned, ("rms",), size)}


def decay(cache: RunCache, best: Best, size: StudySize) -> dict[str, Any]:
    """With weight decay and without, at the race's length and much longer (Moonlight, figure 2).

    The long runs choose between the best learning rate and half of it on one tuning seed. Also stored: the spectral
    norm and the RMS of the watched matrix at the end, by seed, and along the way of the first seed.
    """
    cases = {
        (name, steps, rate): replace(
            _start(best, name, size), steps=steps, setting=replace(best[name], weight_decay=rate)
        )
        for name in PAIR
        for steps in (size.steps, size.long * size.steps)
        for rate in DECAYS
    }
    choices = {key: [best[key[0]].lr / 2, best[key[0]].lr] for key in cases if key[1] > size.steps}
    seed = size.tuning[0]
    tried = iter(cache.gaps([cases[key].at(lr, seed) for key, lrs in choices.items() for lr in lrs]))
    tuning = {key: [next(tried) for _ in lrs] for key, lrs in choices.items()}
    chosen = [
        case.at(choices[key][tuning[key].index(min(tuning[key]))], case.seed) if key in choices else case
        for key, case in cases.items()
    ]
    found = raced(cache, chosen, size.seeds)
    rows = [
        {"optimizer": name, "steps": steps, "weight_decay": rate, "lr": spec.setting.lr}
        | {"lrs": choices.get((name, steps, rate), []), "tuning": tuning.get((name, steps, rate), [])}
        | {"gaps": gaps(runs), "spectral": [one.spectral[-1] for one in runs], "sizes": [one.rms[-1] for one in runs]}
        | {"on_the_way": runs[0]._asdict()}
        for (name, steps, rate), spec, runs in zip(cases, chosen, found, strict=True)
    ]
    return {"rows": rows}


def routing(cache: RunCache, best: Best, size: StudySize) -> dict[str, Any]:
    """Give Muon the hidden matrices only, as the paper does, or also those that it leaves to AdamW."""
    start = _start(best, "muon", size)
    return {"rows": _tuned_rows(cache, {(route,): replace(start, route=route) for route in ROUTES}, ("route",), size)}


def batch(cache: RunCache, best: Best, size: StudySize) -> dict[str, Any]:
    """Read the same windows in small batches and in large ones: many steps, or few."""
    specs = {
        (name, windows): replace(_start(best, name, size), batch=windows, steps=size.windows // windows)
        for windows in size.batches
        for name in PAIR
    }
    rows = _tuned_rows(cache, specs, ("optimizer", "batch"), size)
    for row in rows:
        row["steps"] = size.windows // row["batch"]
    return {"windows": size.windows, "rows": rows}


STUDIES = {"finetune": finetune, "rms": update_rms, "decay": decay, "routing": routing, "batch": batch}


# ---- All of them ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudySize:
    """How much is done.

    long: times as many steps, in the study of weight decay. windows: that every run of the batch study reads.
    farthest: see `retune`.
    """

    steps: int = 300
    long: int = 3
    finetuning: int = 100
    windows: int = 4800
    batches: tuple[int, ...] = (4, 16, 64)
    levels: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8)
    retuned_levels: tuple[float, ...] = (0.05, 0.2, 0.8)
    spectra_seeds: Sequence[int] = RACE_SEEDS[:3]
    seeds: Sequence[int] = RACE_SEEDS[:5]
    tuning: Sequence[int] = TUNING_SEEDS[:2]
    farthest: int = 3


FULL = StudySize()
QUICK = StudySize(
    steps=1,
    long=2,
    finetuning=1,
    windows=16,
    batches=(4, 16),
    levels=(0.05, 0.2),
    retuned_levels=(0.05, 0.2),
    spectra_seeds=RACE_SEEDS[:1],
    seeds=RACE_SEEDS[:2],
    tuning=TUNING_SEEDS[:1],
    farthest=0,
)


def measure(world: World, best: Best, names: Sequence[str], size: StudySize = FULL) -> dict[str, Any]:
    """Take studies, "spectra" or keys of STUDIES; return {study: its data, "best": the settings}. Collective.

    Every rank gets everything.
    """
    cache = RunCache(world)
    data: dict[str, Any] = {"best": {name: asdict(setting) for name, setting in best.items()}}
    # fine-tuning before the others: its pretrained models are runs that they ask for as well
    for name in sorted(names, key=["spectra", *STUDIES].index):
        if name == "spectra":
            data[name] = spectra.study(world, best, size.spectra_seeds, size.steps)
        else:
            data[name] = STUDIES[name](cache, best, size)
    return data
