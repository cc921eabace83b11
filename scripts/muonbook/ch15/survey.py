"""The survey of planned worlds, one dict for book/results/worlds.json: models x ranks x links x batches x baselines.

Every baseline stands beside AdamW, laid out alike on the same grid. All parameters share their buffers, experts as
well: no rank keeps only some of them. There is one pipeline stage, activations are recomputed, and nothing overlaps.
Beside it the world in which a claim was made, with Moonlight's own batches. Deterministic; no process is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from distmuon.optim.newton_schulz import flops
from muonbook.planner.fabrics import FABRICS, Fabric
from muonbook.planner.model_shapes import MODELS, SURVEYED
from muonbook.planner.planned_baselines import PLANNED_BASELINES, PlannedBaseline
from muonbook.planner.planned_worlds import grids, specs_of
from muonbook.planner.stages import Degrees, stages
from muonbook.planner.world_plan import GATHERS, StagePlan, WorldSetting, short

SQUARES = (16, 64)  # for "DP = TP" alone
WORLDS = (16, 32, 64, 128, 512, 1024, 4096)
TOKENS = (1 << 20, 1 << 22, 1 << 24)  # of all ranks, per step
QUICK = (("gpt2", "llama3_8b"), (32, 1024), (1 << 22,))
CLAIMED = ("muon", "muon_cut")  # of PLANNED_BASELINES, those about which something was claimed
CLAIMED_SHARE = 0.03  # at most, of forward and backward: Moonlight (Liu et al. 2025, section 2.3)
MOONLIGHT_RANKS = (16, 32, 64, 128, 256)
MOONLIGHT_TOKENS = (2048 * 8192, 4096 * 8192)  # per step: Liu et al. 2025, section 3.3
FAST = "nvlink_infiniband"

Rows = Sequence[Mapping[str, Any]]


def survey(quick: bool = False) -> dict[str, Any]:
    """Return everything that chapter 15 says about planned worlds."""
    models, worlds, tokens = QUICK if quick else (SURVEYED, WORLDS, TOKENS)
    layouts, cells = [], []
    for model in models:
        for ranks in worlds:
            layouts += layouts_of(model, ranks) if ranks not in SQUARES else []
            cells += cells_of(model, ranks, tokens)
    return {
        "baselines": {name: each.title for name, each in PLANNED_BASELINES.items()},
        "models": {name: _model(name) for name in models},
        "layouts": layouts,
        "cells": cells,
        "verdict": verdict(cells, layouts),
        "moonlight": moonlight(MOONLIGHT_RANKS[:1] if quick else MOONLIGHT_RANKS),
    }


def rows(found: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows with these values."""
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def _model(name: str) -> dict[str, Any]:
    shape = MODELS[name]
    once = sum(flops(weight.shape) for weight in shape.weights() if weight.muon)
    return {
        "title": shape.title,
        "parameters": shape.parameters,
        "active": shape.active,
        # Newton–Schulz of every matrix once, over forward and backward of a million tokens: what gather_all repeats
        "newton_schulz_once_per_million_tokens": short(once / (6 * shape.active * 1e6)),
    }


def layouts_of(model: str, ranks: int) -> list[dict[str, Any]]:
    """Return bytes over ZeRO-1 AdamW's and how often a matrix is orthogonalized, without TP, on average over ranks."""
    specs, indices = specs_of(MODELS[model], 1)
    found = []
    for name in CLAIMED:
        muon = PLANNED_BASELINES[name].lay_out(specs, indices, ranks, 1)
        adamw = PLANNED_BASELINES[name].adamw.lay_out(specs, indices, ranks, 1)
        mine, theirs = (sum(float(each.mean()) for each in part.sent().values()) for part in (muon, adamw))
        once = sum(flops(specs[index].shape) for index in indices)
        repeats = {"repeats": short(float(muon.flops().sum()) / once)}
        found.append({"model": model, "ranks": ranks, "baseline": name, "over_zero1": short(mine / theirs)} | repeats)
    return found


# ---- A step, and which T makes it shortest ------------------------------------------------------------------------


class Step(NamedTuple):
    """Seconds of one step. passes: forward and backward, with what they send over TP. gathers: FSDP2's. update,
    plain_update: part by part, Muon's, and AdamW's laid out alike."""

    passes: float
    gathers: float
    update: Mapping[str, float]
    plain_update: Mapping[str, float]

    def of(self, sequences: float) -> Step:
        """Return the step with so many times as many sequences."""
        return self._replace(passes=sequences * self.passes, gathers=sequences * self.gathers)

    @property
    def muon(self) -> float:
        return self.passes + self.gathers + sum(self.update.values())

    @property
    def adamw(self) -> float:
        return self.passes + self.gathers + sum(self.plain_update.values())

    @property
    def communication(self) -> float:
        """All that the optimizer sends: what a sweet spot of communication alone would be about."""
        return self.gathers + sum(self.update.values()) - self.update["Newton–Schulz"]

    @property
    def extra(self) -> float:
        """What Muon adds to AdamW's step, over the passes."""
        return (self.muon - self.adamw) / self.passes

    @property
    def optimizer(self) -> float:
        """All that is not the passes, over the passes."""
        return self.muon / self.passes - 1


@lru_cache(maxsize=16)  # the flat layouts share AdamW's
def laid_out(model: str, dp: int, tp: int, baseline: PlannedBaseline, recompute: bool = True) -> StagePlan:
    """Return a model on a grid by one baseline. Raises ValueError for a T that the model cannot take."""
    shape = MODELS[model]
    (whole,) = stages(shape, 1, 1)
    setting = WorldSetting(shape, Degrees(dp, tp), recompute=recompute).by(baseline)
    return StagePlan(setting, whole, {"": baseline.lay_out(*specs_of(shape, tp), dp, tp)})


def fits(planned: StagePlan) -> bool:
    """Say whether the fullest rank's model states and the activations of a sequence fit its device."""
    (part,) = planned.parts.values()
    kept = int(np.sum(list(part.states().values()), axis=0).max())
    return kept + planned.activations.held_bytes(1) + part.passing_bytes <= planned.setting.device.memory_bytes


def step_of(model: str, dp: int, tp: int, baseline: PlannedBaseline, fabric: Fabric, recompute: bool = True) -> Step:
    """Return the step in which every DP rank has one sequence."""
    muon, adamw = (
        StagePlan(replace(each.setting, network=fabric), each.weights, each.parts)
        for each in (laid_out(model, dp, tp, how, recompute) for how in (baseline, baseline.adamw))
    )
    passes = muon.pass_seconds()
    gathers = passes.pop(GATHERS, 0.0)
    return Step(sum(passes.values()), gathers, muon.update_seconds(), adamw.update_seconds())


AIMS: dict[str, Callable[[Step], float]] = {
    "step": lambda step: step.muon,
    "communication": lambda step: step.communication,
}


def best(took: Mapping[int, float]) -> int:
    """Return the T that takes least; of equals, the smallest."""
    return min(took, key=lambda tp: (took[tp], tp))


def square_cost(took: Mapping[int, float], ranks: int) -> float | None:
    """Return by how much "DP = TP" takes longer than the best T; None where no grid has D and T within a factor of 2.

    Of D = 2 T and T = 2 D, if D = T cannot be, the better one.
    """
    near = [tp for tp in took if ranks // tp <= 2 * tp <= 4 * (ranks // tp)]
    square = [tp for tp in near if tp * tp == ranks] or near
    return min(took[tp] for tp in square) / min(took.values()) - 1 if square else None


# ---- Cells --------------------------------------------------------------------------------------------------------


def cells_of(model: str, ranks: int, batches: Iterable[int]) -> list[dict[str, Any]]:
    """Return one row per baseline, fabric and batch: which T is best, and what Muon adds there."""
    found = []
    for name, baseline in PLANNED_BASELINES.items():
        every = [tp for _, tp in grids(MODELS[model], ranks)]
        roomy = [tp for tp in every if fits(laid_out(model, ranks // tp, tp, baseline))]
        for title, fabric in FABRICS.items():
            steps = {tp: step_of(model, ranks // tp, tp, baseline, fabric) for tp in roomy}
            for tokens in batches:
                sequences = {tp: tokens / MODELS[model].context / (ranks // tp) for tp in every}
                cell = {"model": model, "ranks": ranks, "tokens": tokens, "fabric": title, "baseline": name}
                found.append(cell | _cell(steps, sequences, ranks))
    return found


def _cell(steps: Mapping[int, Step], sequences: Mapping[int, float], ranks: int) -> dict[str, Any]:
    """Return a row. steps: of one sequence, on grids that have room; sequences: of a DP rank on every grid, by T."""
    enough = [tp for tp, each in sequences.items() if each >= 1]
    fitting = {tp: steps[tp].of(sequences[tp]) for tp in enough if tp in steps}
    if not fitting:
        return {"tp": None, "why": "no batch" if not enough else "no room"}
    took = {aim: {tp: seconds(step) for tp, step in fitting.items()} for aim, seconds in AIMS.items()}
    tp = best(took["step"])
    costs = {aim: square_cost(each, ranks) for aim, each in took.items()}
    return {
        "tp": tp,
        "tp_choices": " ".join(map(str, fitting)),
        "tp_for_communication": best(took["communication"]),
        "square_cost": None if costs["step"] is None else short(costs["step"]),
        "square_cost_communication": None if costs["communication"] is None else short(costs["communication"]),
        "over_adamw": short(fitting[tp].muon / fitting[tp].adamw),
        "over_forward_backward": short(fitting[tp].extra),
    }


def choices(cell: Mapping[str, Any]) -> list[int]:
    """Return the T that fit in a cell."""
    return [int(tp) for tp in cell["tp_choices"].split()]


def with_a_square(cells: Rows) -> list[Mapping[str, Any]]:
    """Return the cells in which a grid with D = T, or nearly, fits, and another."""
    return [c for c in cells if c["tp"] is not None and len(choices(c)) > 1 and c["square_cost"] is not None]


# ---- What they say together: of "near 1", of "1 to 3 %", and of "DP = TP" -----------------------------------------


def verdict(cells: Rows, layouts: Rows) -> dict[str, Any]:
    """Return under how many assumptions each world was planned, what layouts say, and what each baseline's cells."""
    names = list(dict.fromkeys(cell["baseline"] for cell in cells))
    by = {name: of_baseline([cell for cell in cells if cell["baseline"] == name]) for name in names}
    assumptions = len({(cell["tokens"], cell["fabric"]) for cell in cells})
    return {"assumptions": assumptions, "near_one": near_one(layouts), **by}


def near_one(layouts: Rows) -> dict[str, float]:
    """Return bytes over ZeRO-1 AdamW's, least and most over all layouts; redundancy: how often `muon_cut`
    orthogonalizes a matrix."""
    found = {name: [row["over_zero1"] for row in layouts if row["baseline"] == name] for name in CLAIMED}
    found["redundancy"] = [row["repeats"] for row in layouts if row["baseline"] == "muon_cut"]
    ends = {"least": min, "most": max}
    return {f"{name}_{end}": pick(values) for name, values in found.items() for end, pick in ends.items()}


def of_baseline(cells: Rows) -> dict[str, Any]:
    """Return the verdict on one baseline's cells."""
    found = [cell for cell in cells if cell["tp"] is not None]
    choice = [cell for cell in found if len(choices(cell)) > 1]
    square = with_a_square(cells)
    open_end = [cell for cell in square if max(choices(cell)) ** 2 > 2 * cell["ranks"]]  # T > D is possible too
    return {
        "adds_at_most_3_percent": {  # to forward and backward
            f"{tokens:,} tokens": share(
                cell["over_forward_backward"] <= CLAIMED_SHARE for cell in found if cell["tokens"] == tokens
            )
            for tokens in sorted({cell["tokens"] for cell in found})
        },
        "with_a_choice": len(choice),
        "least_tp_wins_step": share(cell["tp"] == min(choices(cell)) for cell in choice),
        "most_tp_wins_communication": share(cell["tp_for_communication"] == max(choices(cell)) for cell in choice),
        "square_possible": len(square),
        "square_worlds": len({(cell["model"], cell["ranks"]) for cell in square}),
        "square_wins_step": share(cell["square_cost"] == 0 for cell in square),
        "square_cost_median": short(median([cell["square_cost"] for cell in square])) if square else None,
        "square_wins_communication": share(cell["square_cost_communication"] == 0 for cell in square),
        "square_wins_communication_then": share(cell["square_cost_communication"] == 0 for cell in open_end),
    }


def share(values: Iterable[bool]) -> float | None:
    """Return the share of truths; None of none."""
    found = list(values)
    return short(sum(found) / len(found)) if found else None


# ---- The world in which a claim was made --------------------------------------------------------------------------


def moonlight(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return what Muon adds to Moonlight's own batches on NVLink and InfiniBand, by ranks and baseline, at the best T.

    Nothing is recomputed, so that forward and backward are what the paper's sentence is about.

    extra: over AdamW laid out alike; optimizer: all that is not forward and backward. Both over forward and backward.
    """
    found, shape = [], MODELS["moonlight"]
    for name in CLAIMED:
        for ranks in sizes:
            steps = {}
            for dp, tp in grids(shape, ranks):
                given = ("moonlight", dp, tp, PLANNED_BASELINES[name])
                if fits(laid_out(*given, recompute=False)):
                    steps[tp] = step_of(*given, FABRICS[FAST], recompute=False)
            for tokens in MOONLIGHT_TOKENS if steps else ():
                timed = {tp: step.of(tokens / shape.context / (ranks // tp)) for tp, step in steps.items()}
                tp = best({tp: step.muon for tp, step in timed.items()})
                place = {"baseline": name, "ranks": ranks, "tokens": tokens, "tp": tp}
                shares = {"extra": short(timed[tp].extra), "optimizer": short(timed[tp].optimizer)}
                found.append(place | shares)
    return found
