"""What one change to Muon costs or gains on the language: five studies beside the race.

Every study starts from the settings that the race tuned and changes one thing. Each variation tunes its learning rate
again, on seeds of its own, and all then run on the race's seeds. Gaps are losses above the floor, in nats per letter.

Blocks stand for tensor parallelism in one process: where TP would hold a hidden matrix in T pieces, `BlockMuon`
orthogonalizes T pieces, and all else is as in Muon. T = 8 is no grid that could run here, because the network has four
heads, but blocks do not mind. Momentum and weight decay are those that the race tuned for whole matrices, so if any of
them has an advantage, it is Muon on whole matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from distmuon.launch import World
from distmuon.optim.muon import Muon
from distmuon.optim.param_groups import by_algorithm
from distmuon.verify.blocks import BlockMuon
from muonbook.ch04.search_space import Setting, muon_and_adamw
from muonbook.ch04.sweep import Name, best_of, described, shared_out, try_rates, verdict
from muonbook.ch04.tasks import LearningTask
from muonbook.ch04.training import Build, train

MATCHED = 0.2  # the RMS of Muon's update (`muon.scale`)
RMS, RMS_RETUNED = (0.05, 0.1, 0.2, 0.4, 0.8), (0.05, 0.2, 0.8)
ROUTES = {  # which matrices go to Muon -> the modules that join the hidden ones
    "hidden": (),
    "hidden + embeddings": ("tokens", "positions"),
    "hidden + head": ("head",),
    "all matrices": ("tokens", "positions", "head"),
}
DECAYS, LONGER = (0.0, 0.1), 3  # LONGER: times as many steps, in the study of weight decay
BATCHES = (4, 16, 64)
PAIR = ("adamw", "muon")
DOUBLING = (0.5, 1.0, 2.0)  # of a variation's own learning rate: what is tried first
FINER = tuple(2 ** (n / 2) for n in (-1, 0, 1))

Best = Mapping[str, Setting]  # {"sgd", "adamw", "muon"}: tuned on the language at its default steps


@dataclass(frozen=True)
class StudySize:
    """How much is done. farthest: learning rates beyond the first ones, at most."""

    task: LearningTask
    seeds: Sequence[int]
    tuning: Sequence[int]
    farthest: int


class Variation(NamedTuple):
    """One thing changed: another setting, other steps and batches, or other optimizers (build; None: as it raced)."""

    setting: Setting
    task: LearningTask
    build: Build | None = None

    def at(self, lr: float) -> Variation:
        return self._replace(setting=self.setting.at(lr))


def final_gaps(world: World, runs: Sequence[tuple[Variation, int]]) -> list[float]:
    """Train each variation under its seed; return the losses above the floor after the last step. Collective."""

    def do(run: tuple[Variation, int]) -> float:
        (setting, task, build), seed = run
        assert task.floor is not None
        return train(task, setting, seed, build).final - task.floor(seed)

    return shared_out(world, runs, do)


def raced(world: World, variations: Sequence[Variation], seeds: Sequence[int]) -> list[list[float]]:
    """Return the gaps, [variation][seed]. Collective."""
    found = iter(final_gaps(world, [(one, seed) for one in variations for seed in seeds]))
    return [[next(found) for _ in seeds] for _ in variations]


def retuned(
    world: World, variations: Mapping[Name, Variation], size: StudySize, factors: Sequence[float] = DOUBLING
) -> dict[Name, dict[str, Any]]:
    """Tune the learning rate of every variation, from `factors` of its own on, and run the best on fresh seeds.

    Return {name: {"lr", "lrs", "medians", "gaps"}}: the best rate, those tried with their median gaps, and its gaps on
    the fresh seeds. Everything else of a setting stays as the race tuned it. Collective.
    """

    def losses(runs: Sequence[tuple[Name, float, int]]) -> list[float]:
        return final_gaps(world, [(variations[name].at(lr), seed) for name, lr, seed in runs])

    first = {name: [one.setting.lr * factor for factor in factors] for name, one in variations.items()}
    curves = try_rates(first, losses, size.tuning, size.farthest)
    best = {name: best_of(curve) for name, curve in curves.items()}
    gaps = raced(world, [variations[name].at(lr) for name, lr in best.items()], size.seeds)
    return {
        name: {"lr": best[name], "lrs": list(curve), "medians": list(curve.values()), "gaps": found}
        for (name, curve), found in zip(curves.items(), gaps, strict=True)
    }


# ---- The studies ------------------------------------------------------------------------------------------


def with_rms(value: float) -> Build:
    """Return what builds Muon whose updates have another RMS than 0.2, and decay as much as before per step.

    The step is lr (0.2 sqrt(max(A, B)) O + decay W): with lr scaled by value / 0.2 and decay by the inverse, only the
    first part changes (Moonlight, table 8).
    """

    def build(model: nn.Module, setting: Setting) -> list[Optimizer]:
        muon, adamw = muon_and_adamw(by_algorithm(model), setting)
        for group in muon.param_groups:
            group["lr"] *= value / MATCHED
            group["weight_decay"] *= MATCHED / value
        return [muon, adamw]

    return build


def update_rms(world: World, best: Best, size: StudySize) -> dict[str, Any]:
    """Set the RMS of Muon's update, all else unchanged (Moonlight, table 8); then tune the learning rate for each.

    The learning rate is that of AdamW's part too, so what tuning cannot give back is due to their ratio.
    """
    cases = {value: Variation(best["muon"], size.task, with_rms(value)) for value in RMS}
    unchanged = raced(world, list(cases.values()), size.seeds)
    tuned = retuned(world, {value: cases[value] for value in RMS_RETUNED}, size)
    return {
        "lr": best["muon"].lr,
        "rows": [{"rms": value, "gaps": gaps} for value, gaps in zip(RMS, unchanged, strict=True)],
        "tuned": [{"rms": value} | row for value, row in tuned.items()],
    }


def decay(world: World, best: Best, size: StudySize) -> dict[str, Any]:
    """Train with weight decay and without, at the race's length and three times as long.

    The long runs choose between the best learning rate and half of it on one tuning seed (Moonlight, figure 2).
    """
    rows = []
    for longer, factors in ((1, (1.0,)), (LONGER, (0.5, 1.0))):
        task = replace(size.task, steps=longer * size.task.steps)
        cases = {(o, rate): Variation(replace(best[o], weight_decay=rate), task) for o in PAIR for rate in DECAYS}
        found = retuned(world, cases, replace(size, tuning=size.tuning[:1], farthest=0), factors)
        rows += [{"optimizer": o, "steps": task.steps, "weight_decay": rate} | row for (o, rate), row in found.items()]
    return {"rows": rows}


def routed(route: str) -> Build:
    """Return what gives Muon the matrices of one of ROUTES, and AdamW all else."""

    def build(model: nn.Module, setting: Setting) -> list[Optimizer]:
        joining = {id(p) for name in ROUTES[route] for p in model.get_submodule(name).parameters()}
        params: dict[str, list[nn.Parameter]] = {"muon": [], "adamw": []}
        for algorithm, group in by_algorithm(model).items():
            for p in group:
                params["muon" if id(p) in joining else algorithm].append(p)
        return muon_and_adamw(params, setting)

    return build


def routing(world: World, best: Best, size: StudySize) -> dict[str, Any]:
    """Give Muon the hidden matrices only, as the paper does, or also those that it leaves to AdamW."""
    found = retuned(world, {route: Variation(best["muon"], size.task, routed(route)) for route in ROUTES}, size)
    return {"rows": [{"route": route} | row for route, row in found.items()]}


def batch(world: World, best: Best, size: StudySize) -> dict[str, Any]:
    """Read the same windows in small batches and in large ones: many steps, or few."""
    windows = size.task.batch * size.task.steps
    tasks = {n: replace(size.task, batch=n, steps=max(1, windows // n)) for n in BATCHES}
    found = retuned(world, {(o, n): Variation(best[o], task) for n, task in tasks.items() for o in PAIR}, size)
    rows = [{"optimizer": o, "batch": n} | row | {"steps": tasks[n].steps} for (o, n), row in found.items()]
    return {"windows": windows, "rows": rows}


STUDIES = {"rms": update_rms, "decay": decay, "routing": routing, "batch": batch}


# ---- Blocks -----------------------------------------------------------------------------------------------


class Blocking(NamedTuple):
    """Into how many blocks a matrix is cut for Newton–Schulz, T, and in which steps it is not, every k-th.

    blocks: T. whole_every: k; 1 is Muon, 0 blockwise, what is between periodic.
    """

    blocks: int
    whole_every: int

    def optimizers(self, model: nn.Module, setting: Setting) -> list[Optimizer]:
        """Return the optimizers, stepped one after the other."""
        ratio = "shape" if self.whole_every else 1.0  # as the strategies do by default
        make = Muon if self == WHOLE else partial(BlockMuon, block_lr_ratio=ratio, **self._asdict())
        return muon_and_adamw(by_algorithm(model), setting, make)


WHOLE = Blocking(1, 1)
BLOCKINGS = (WHOLE, *starmap(Blocking, ((2, 5), (2, 0), (4, 2), (4, 5), (4, 0), (8, 5), (8, 0))))


def blocks(world: World, best: Setting, size: StudySize, blockings: Sequence[Blocking] = BLOCKINGS) -> dict[str, Any]:
    """Tune with every blocking and race them all; return what is kept, as plain data. Collective.

    best: whole Muon's setting.
    """
    found = retuned(world, {b: Variation(best, size.task, b.optimizers) for b in blockings}, size, FINER)
    rows = [b._asdict() | row | against(row["gaps"], found[blockings[0]]["gaps"]) for b, row in found.items()]
    of = {"weight_decay": best.weight_decay, "momentum": best.momentum, "tuning_seeds": list(size.tuning)}
    return described(size.task, size.seeds) | of | {"rows": rows}


def against(gaps: Sequence[float], whole: Sequence[float]) -> dict[str, Any]:
    """Return by how much gaps exceed whole Muon's, seed by seed, on how many they do, and whether that may be said."""
    found, more = verdict(gaps, whole), [a - b for a, b in zip(gaps, whole, strict=True)]
    return {"more_than_whole": more, "worse": found.losses, "better": found.wins, "claimed": found.claimed}
