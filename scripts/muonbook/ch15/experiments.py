"""What chapter 15 asks of the planner: a published model on one grid by every layout, which of its ranks do the same
matrix, and what eight ranks send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from distmuon.sharding.layout import ParamSpec
from muonbook.measure import results
from muonbook.measure.trainers import predict_activations
from muonbook.measure.workload import Workload
from muonbook.planner.choices import Compared, compared
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.owned_worlds import OwnedWorld
from muonbook.planner.parts.every_rank import Zero1Part
from muonbook.planner.planned_baselines import PLANNED_BASELINES
from muonbook.planner.planned_worlds import specs_of
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldSetting
from muonbook.runnable_baselines import RUNNABLE

ON_ZERO1 = ("muon", "muon_flat", "muon_cut", "muon_owner")  # of PLANNED_BASELINES


def planned(model: str, dp: int, tp: int, tokens: int) -> dict[str, Compared]:
    """Return {name: a plan beside AdamW's} of the four layouts on ZeRO-1, with activations recomputed."""
    world = WorldSetting(MODELS[model], Degrees(dp, tp), tokens=tokens, recompute=True)
    return {name: each for name, each in zip(PLANNED_BASELINES, compared(world), strict=True) if name in ON_ZERO1}


def step_ratios(plans: dict[str, Compared]) -> dict[str, float]:
    """Return {title: a step of Muon over one of AdamW}."""
    return {each.baseline.title: each.over_adamw for each in plans.values()}


def share_of_passes(plans: dict[str, Compared]) -> dict[str, float]:
    """Return Newton–Schulz over forward and backward without recomputing, in per cent, in three steps of the bucketed
    layout: each matrix once, all that repeat it, and with the wait for the slowest rank of every bucket."""
    bucketed, owner = plans["muon"].muon, plans["muon_owner"].muon
    passes, flops = owner.seconds["forward, backward"] * 6 / 8, owner.setting.fabric.flops_per_second
    return {
        "each matrix once": 100 * owner.flops[0] / flops / passes,
        "repeated on every rank that holds a piece": 100 * bucketed.flops[0] / flops / passes,
        "and waiting for the slowest rank": 100 * bucketed.seconds["Newton–Schulz"] / passes,
    }


def surveyed() -> tuple[dict[str, Any], dict[tuple[str, int, str], dict[str, Any]]]:
    """Return the stored survey of planned worlds, and of those with 4 Mi tokens and fast links {(model, ranks, layout):
    the plan on the quickest grid}."""
    found = results.load("worlds")
    cells = (each for each in found["cells"] if (each["tokens"], each["fabric"]) == (1 << 22, "nvlink_infiniband"))
    return found, {(each["model"], each["ranks"], each["baseline"]): each for each in cells}


def predicted_bytes(workload: Workload, dp: int, tp: int) -> tuple[float, float]:
    """Return what a rank sends in a step of ZeRO-1 AdamW, mean over DP ranks: over DP, and activations over TP."""
    _, _, model = workload.plan(dp, tp)
    activations = predict_activations(model, workload, dp, tp).total().sent_bytes
    both = sum(RUNNABLE["zero1"].predict(workload, dp, tp, (rank, 0)).total().sent_bytes for rank in range(dp)) / dp
    return both - activations, float(activations)


# ---- Which ranks do the same matrix ---------------------------------------------------------------------------


class Repeats(NamedTuple):
    """A baseline's ranks. busy: [T, D] bool, those that orthogonalize the matrix; mean: of all matrices, how many
    ranks do the same one, weighted by operations."""

    title: str
    busy: np.ndarray
    mean: float

    @property
    def ranks(self) -> int:
        return int(self.busy.sum())

    @property
    def dp_ranks(self) -> int:
        """How many DP ranks hold a piece of the matrix, or own it."""
        return int(self.busy.any(axis=0).sum())


def repeats(model: str, dp: int, tp: int, matrix: str, baselines: Sequence[str]) -> list[Repeats]:
    """Lay a model out by some of `PLANNED_BASELINES` and look one of its matrices up."""
    specs, indices = specs_of(MODELS[model], tp)
    (named,) = (index for index in indices if specs[index].name == matrix)
    return [_repeats(name, specs, indices, dp, tp, named) for name in baselines]


def _repeats(name: str, specs: Sequence[ParamSpec], indices: frozenset[int], dp: int, tp: int, index: int) -> Repeats:
    part = PLANNED_BASELINES[name].lay_out(specs, indices, dp, tp)
    assert isinstance(part, Zero1Part)
    world, busy = part.world, np.zeros((tp, dp), bool)
    if isinstance(world, OwnedWorld):
        owner = world.owner_of[index]
        assert owner.tp is not None, "planned matrices are whole ones"
        busy[owner.tp, owner.dp] = True
    else:
        (found,) = (row for _, rows in world.matrices for row in rows if row.place == index)
        busy[:, found.slice] = True
    return Repeats(PLANNED_BASELINES[name].title, busy, world.redundancy)
