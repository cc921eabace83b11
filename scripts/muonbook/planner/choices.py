"""Worlds planned side by side: which division of a number of ranks fits and is quick, and which Muon.

Every way to divide the ranks is sorted out by rule of thumb, and the best of them are really planned. The rule of thumb
knows no layout: model states divided evenly, what a micro-batch takes, gradients and parameters over DP, and
Newton–Schulz on every matrix once, shared out evenly. It says whom to plan first; what is told, who fits, and the order
come from the plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from distmuon.launch import UsageError
from distmuon.optim.newton_schulz import flops
from muonbook.planner.model_shapes import Shape
from muonbook.planner.planned_baselines import PLANNED_BASELINES, PlannedBaseline
from muonbook.planner.stages import all_degrees, expert_of, stages, weights_of
from muonbook.planner.world_plan import StagePlan, WorldPlan, WorldSetting, short

SHOWN = 6  # plans that fit, of those that the rule of thumb likes best


class Search(NamedTuple):
    """What a search found. plans: those that fit, quickest first. possible: how many divisions the model and the batch
    permit. roomy: how many of them fit by the rule of thumb."""

    plans: list[WorldPlan]
    possible: int
    roomy: int


class ModelTotals(NamedTuple):
    """A model as a whole: elements of dense weights and of routed experts; what Newton–Schulz on all of it costs."""

    dense: int
    experts: int
    flops: float


def search(setting: WorldSetting, ranks: int) -> Search:
    """Return the divisions of `ranks` that fit, the best `SHOWN` by rule of thumb really planned.

    setting: its `degrees` are not looked at. Raises UsageError where none is possible, or none fits.
    """
    whole = _whole(setting.shape)
    possible = divisions(setting, ranks)
    if not possible:
        raise UsageError(
            f"--ranks {ranks}: no division of it gives every DP rank a sequence of {setting.shape.context:,} out of "
            f"--tokens {setting.tokens:,}; choose more tokens."
        )
    roomy = [
        (_least_seconds(each, whole), each)
        for each in possible
        if _least_bytes(each, whole) <= setting.device.memory_bytes
    ]
    plans: list[WorldPlan] = []
    for _, each in sorted(roomy, key=lambda pair: pair[0]):
        if len(plans) < SHOWN and (plan := WorldPlan(each)).fits:
            plans.append(plan)
    if not plans:
        given = {"--recompute": setting.recompute, "--sequence-parallel": setting.sequence_parallel}
        remedy = ", or ".join(["choose more ranks", *(option for option, there in given.items() if not there)])
        raise UsageError(f"--ranks {ranks}: of {len(possible)} divisions none fits {setting.device.title}; {remedy}.")
    return Search(sorted(plans, key=lambda plan: plan.step_seconds), len(possible), len(roomy))


def divisions(setting: WorldSetting, ranks: int) -> list[WorldSetting]:
    """Return the setting in every division of `ranks` that the model and the batch permit."""
    asked = (replace(setting, degrees=each) for each in all_degrees(setting.shape, ranks, setting.network.node))
    return [each for each in asked if each.micro_batches >= 1 and each.divides_sequences]


def _whole(shape: Shape) -> ModelTotals:
    dense = experts = 0
    work = 0.0
    for weight in weights_of(shape):
        if expert_of(weight.name) is None:
            dense += math.prod(weight.shape)
        else:
            experts += math.prod(weight.shape)
        work += flops(weight.shape) if weight.muon else 0
    return ModelTotals(dense, experts, work)


def _held(setting: WorldSetting, whole: ModelTotals) -> tuple[float, float]:
    """Return the elements of dense weights and of experts on a rank, shared out evenly over T, P and E."""
    _, tp, pp, ep = setting.degrees
    return whole.dense / tp / pp, whole.experts / tp / pp / ep


def _least_bytes(setting: WorldSetting, whole: ModelTotals) -> float:
    """Return about what the fullest rank holds at least: weights, gradients, masters, state, activations."""
    cut = {"adamw": 12, "muon": 8, "muonw": 12}[setting.optimizer]  # bytes per element of a shard
    kept = {"adamw": 6, "muon": 6, "muonw": 0}[setting.optimizer]  # of what every rank holds
    dense, experts = _held(setting, whole)
    states = kept * (dense + experts) + cut * (dense / setting.degrees.dp + experts / setting.degrees.replicas)
    first = StagePlan(setting, stages(setting.shape, *setting.degrees[2:])[0])
    return 0.9 * states + first.activations.held_bytes(setting.micro_batches)  # stages are uneven


def _least_seconds(setting: WorldSetting, whole: ModelTotals) -> float:
    """Return about what a step takes at least."""
    pp, fabric = setting.degrees.pp, setting.fabric
    plans = [StagePlan(setting, each) for each in stages(setting.shape, *setting.degrees[2:])]
    slowest = max(sum(plan.pass_seconds().values()) for plan in plans)
    update = 0.0 if setting.optimizer == "adamw" else whole.flops / setting.degrees.ranks / fabric.flops_per_second
    sizes = zip(_held(setting, whole), (setting.degrees.dp, setting.degrees.replicas), strict=True)
    for size, dp in sizes if setting.optimizer != "muonw" else ():
        links = fabric.links(dp, setting.degrees.tp, stride=setting.degrees.tp * setting.degrees.dp // dp)
        update += 6 * size * (dp - 1) / dp / links["dp"].bytes_per_second
    return (setting.micro_batches + pp - 1) * slowest + update


# ---- Which Muon ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A baseline in a world, and AdamW in it."""

    baseline: PlannedBaseline
    muon: WorldPlan
    adamw: WorldPlan

    @property
    def over_adamw(self) -> float:
        return self.muon.step_seconds / self.adamw.step_seconds

    @property
    def repeats(self) -> float:
        """How many ranks orthogonalize the same matrix, on average, weighted by operations."""
        setting = self.muon.setting
        once = sum(flops(weight.shape) for weight in setting.shape.weights() if weight.muon)
        return setting.degrees.ranks * self.muon.flops[0] / once

    def as_dict(self) -> dict[str, Any]:
        """Return it for a results file: Muon's plan, and how it stands to AdamW's."""
        stands = {"over_adamw": short(self.over_adamw), "repeats": short(self.repeats)}
        return {"baseline": self.baseline.title} | stands | self.muon.as_dict()


def compared(setting: WorldSetting) -> list[Compared]:
    """Plan a world by every baseline of `PLANNED_BASELINES`, whichever `setting` names."""
    plans = {each: WorldPlan(setting.by(each)) for each in {each.adamw for each in PLANNED_BASELINES.values()}}
    return [Compared(each, WorldPlan(setting.by(each)), plans[each.adamw]) for each in PLANNED_BASELINES.values()]
