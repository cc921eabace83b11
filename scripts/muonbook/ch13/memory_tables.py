"""Chapter 13's tables, from book/results/memory.json and from maps alone: numbers first, names last.

`planned_peaks` says what a layout makes of the peak of a published model's step: bf16 parameters and float32 gradients
are whole on every rank, master weights and state are divided by D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from distmuon.sharding.layout import ITEM_BYTES
from muonbook.baselines import BASELINES
from muonbook.ch13.meta_device import weigh_worst_moves
from muonbook.ch13.step_memory import PASSES
from muonbook.planner.model_shapes import Shape, Weight, local_specs
from muonbook.planner.owned_worlds import plan_part
from muonbook.planner.parts.every_rank import Zero1Part
from muonbook.planner.planned_worlds import BUCKET_RULES
from muonbook.planner.stages import Degrees, stages
from muonbook.planner.world_plan import WorldPlan, WorldSetting
from muonbook.runnable_baselines import ZERO1

Found = Mapping[str, Any]  # as `memory_study.measure` returns it
RULES = {"muon_single": None, "muon": "megatron", "muon_flat": "flat", "muon_cut": "flat", "muon_owner": "megatron"}
# column -> strategy, bucket rule; None: a bucket for every matrix
PLANNED = {BASELINES[name].title: (BASELINES[name].strategy, rule) for name, rule in RULES.items()}

# ---- What is saved ----------------------------------------------------------------------------------------


def share_of_matrices(model: Shape) -> float:
    """Return which share of a model's parameters Muon moves."""
    return sum(math.prod(weight.shape) for weight in model.weights() if weight.muon) / model.parameters


# ---- What a step takes ------------------------------------------------------------------------------------


def on_nccl(stage: str) -> bool:
    """Say whether NCCL, too, borrows what this stage of a step borrows here: gloo's reduce-scatter makes a copy."""
    return stage != "reduce_scatter"


def peaks_of_batches(found: Found) -> dict[int, dict[str, StepPeaks]]:
    """Return {tokens per rank: {"AdamW", or a column of PLANNED: peaks of a step on rank 0}}, as NCCL would borrow."""
    titles = dict(zip(ZERO1, ("AdamW", *PLANNED), strict=True))
    peaks: dict[int, dict[str, StepPeaks]] = {}
    for row in found["batches"]:
        name, kept = row["baseline"], row["standing"]
        borrowed = {stage: size for stage, size in row["stages"].items() if on_nccl(stage)}
        passes, update = (
            max(size for stage, size in borrowed.items() if (stage in PASSES) == before) for before in (True, False)
        )
        both = StepPeaks(RankPeak(kept, passes), RankPeak(kept, update))
        peaks.setdefault(row["tokens_per_rank"], {})[titles[name]] = both
    return peaks


# ---- Planned models ---------------------------------------------------------------------------------------


class WeighedPart(NamedTuple):
    """Weights laid out in one way. moves: bytes that its update's moves borrow on `dp_rank`, weighed without data."""

    laid_out: Zero1Part
    dp_rank: int
    moves: int

    @property
    def kept(self) -> np.ndarray:
        """What every DP rank keeps, in bytes, [D]."""
        return np.sum(list(self.laid_out.states().values()), axis=0)


@cache
def _weighed(weights: tuple[Weight, ...], dp: int, tp: int) -> dict[str, WeighedPart]:
    """Return {column of PLANNED: these weights in that layout, weighed on the rank with the largest bound}."""
    specs, muon = local_specs(weights, tp)
    found = {}
    for column, (strategy, rule) in PLANNED.items():
        world = plan_part(specs, muon, dp, tp, BUCKET_RULES[rule](dp) if rule else 1, strategy)
        found[column] = WeighedPart(Zero1Part(world), *weigh_worst_moves(world.layout, world.muon, tp, strategy))
    return found


def adamw_update_bound(model: Shape, degrees: Degrees) -> int:
    """Return a bound of what AdamW's update borrows, in bytes: three of its largest piece, a parameter at a time."""
    largest = 0
    for stage in stages(model, degrees.pp, degrees.ep):
        for weights, dp in ((stage.dense, degrees.dp), (stage.experts, degrees.replicas)):
            sizes = [spec.numel for spec in local_specs(weights, degrees.tp)[0]]
            largest = max(largest, min(max(sizes, default=0), -(-sum(sizes) // dp)))
    return 3 * ITEM_BYTES["float32"] * largest


def repeats(model: Shape, degrees: Degrees) -> dict[str, float]:
    """Return {column of PLANNED: how many ranks orthogonalize the same matrix, mean weighted by operations}."""
    (stage,) = stages(model, 1, 1)
    laid_out = _weighed(stage.dense, degrees.dp, degrees.tp)
    return {column: part.laid_out.world.redundancy for column, part in laid_out.items()}


class RankPeak(NamedTuple):
    """A peak on the rank that is fullest there, in bytes. kept: from step to step; borrowed: alive beyond that."""

    kept: float
    borrowed: float

    @property
    def top(self) -> float:
        """All that it holds."""
        return self.kept + self.borrowed


class StepPeaks(NamedTuple):
    """The two peaks of a step: in the forward and backward passes, and in the update."""

    passes: RankPeak
    update: RankPeak

    @property
    def highest(self) -> RankPeak:
        """The step's peak."""
        return max(self, key=lambda peak: peak.top)


@cache
def planned_peaks(model: Shape, degrees: Degrees) -> dict[str, StepPeaks]:
    """Return {"AdamW", or a column of PLANNED: peaks of a step with AdamW, or with Muon in that layout}.

    A step recomputes layers, takes one sequence at a time, and cuts sequences over TP, too. The update's peak is that
    of the rank whose moves have the largest bound. If it is the step's peak, the passes' is that rank's, too, else that
    of the rank that keeps most; all ranks' passes borrow the same. AdamW's update is a bound.
    Raises ValueError for pipelines and shared-out experts, whose parts peak one by one, and where AdamW's update may
    borrow more than the passes do.
    """
    if degrees.pp > 1 or degrees.ep > 1:
        raise ValueError(f"peaks are those of one part; not of PP {degrees.pp}, EP {degrees.ep}.")
    setting = WorldSetting(
        model, degrees, "adamw", "gather_all", "megatron", recompute=True, sequence_parallel=degrees.tp > 1
    )
    adamw = WorldPlan(setting)
    passes, update = adamw.held["activations"], adamw_update_bound(model, degrees)
    if update > passes:
        raise ValueError(f"{model.title}: AdamW's update may borrow {update:,} bytes; its passes leave {passes:,.0f}.")
    (stage,) = stages(model, 1, 1)
    kept = adamw.fullest[2] - passes
    found = {"AdamW": StepPeaks(RankPeak(kept, passes), RankPeak(kept, update))}
    for column, part in _weighed(stage.dense, degrees.dp, degrees.tp).items():
        most = float(part.kept.max())
        moves = RankPeak(float(part.kept[part.dp_rank]), float(part.moves))
        found[column] = StepPeaks(RankPeak(moves.kept if moves.top > most + passes else most, passes), moves)
    return found
