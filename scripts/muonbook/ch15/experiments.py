"""What chapter 15 asks of the planner: one published model on one grid, by every layout, and what eight ranks send."""

from __future__ import annotations

from muonbook.measure.baselines import predict_activations, predict_zero1
from muonbook.measure.workload import Workload
from muonbook.planner.choices.comparison import Compared, compared
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldSetting

NAMES = {
    "bucketed": "gather all, bucketed",
    "flat": "gather all, flat",
    "flat + cut": "gather cut, flat",
    "owner": "one owner per matrix",
}


def planned(model: str, dp: int, tp: int, tokens: int) -> dict[str, Compared]:
    """Return {title: a plan beside AdamW's} of the four layouts on ZeRO-1, with activations recomputed."""
    world = WorldSetting(MODELS[model], Degrees(dp, tp), tokens=tokens, recompute=True)
    return {each.algorithm.title: each for each in compared(world) if each.algorithm.title in NAMES}


def step_ratios(plans: dict[str, Compared]) -> dict[str, float]:
    """Return {layout: a step of Muon over one of AdamW}."""
    return {NAMES[title]: each.over_adamw for title, each in plans.items()}


def share_of_passes(plans: dict[str, Compared]) -> dict[str, float]:
    """Return Newton–Schulz over forward and backward without recomputing, in per cent, in three steps of the bucketed
    layout: each matrix once, all that repeat it, and with the wait for the slowest rank of every bucket."""
    bucketed, owner = plans["bucketed"].muon, plans["owner"].muon
    passes, flops = owner.seconds["forward, backward"] * 6 / 8, owner.setting.fabric.flops_per_second
    return {
        "each matrix once": 100 * owner.flops[0] / flops / passes,
        "repeated on every rank that holds a piece": 100 * bucketed.flops[0] / flops / passes,
        "and waiting for the slowest rank": 100 * bucketed.seconds["Newton–Schulz"] / passes,
    }


def predicted_bytes(workload: Workload, dp: int, tp: int) -> tuple[float, float]:
    """Return what a rank sends in a step of ZeRO-1 AdamW, mean over DP ranks: over DP, and activations over TP."""
    _, _, model = workload.plan(dp, tp)
    activations = predict_activations(model, workload, dp, tp).total().sent_bytes
    both = sum(predict_zero1(workload, dp, tp, rank).total().sent_bytes for rank in range(dp)) / dp
    return both - activations, float(activations)
