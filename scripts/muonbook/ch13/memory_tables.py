"""Chapter 13's tables and curves, from book/results/memory.json and from maps alone: numbers first, names last.

`plan_memory` says what the layout of a published model makes of one rank, AdamW beside Muon, both as ours are built:
bf16 parameters whole on every rank, float32 gradients, masters and state in 1/D shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE, plan
from distmuon.verify.model_states import KINDS, STATE, ModelStates, predict_shards
from distmuon.verify.prediction import predict_transient
from muonbook.figures.style import in_bytes
from muonbook.measure.baselines import BASELINES
from muonbook.measure.workload import SHAPES, Workload
from muonbook.planner.model_shapes import MODELS, SURVEYED, Shape
from muonbook.planner.planned_worlds import BUCKET_RULES

Found = Mapping[str, Any]  # as `memory_study.measure` returns it
Curve = tuple[list[float], list[float]]
SUMS: dict[str, Sequence[str]] = {"state": [*STATE], "+ masters": [*STATE, "masters"], "rank": KINDS}
OURS = ("zero1", "muon")  # AdamW and Muon on equal terms
PUBLISHED_GRIDS = [(8, 1), (64, 1), (8, 8), (64, 8)]
ACCELERATOR = 80 * 10**9  # bytes: what a rank keeps has to fit

# ---- Planned models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryPlan:
    """The rank whose update takes most memory, in bytes.

    adamw, muon: what it keeps, per kind. adamw_transient, muon_transient: bounds of what the update takes besides,
    under NCCL, whose reduce-scatter needs no room, and with Newton–Schulz in bf16.
    """

    adamw: ModelStates
    muon: ModelStates
    adamw_transient: int
    muon_transient: int

    @property
    def saved(self) -> int:
        """What Muon does not keep: one of AdamW's two moments, for the hidden matrices."""
        return sum(self.adamw.values()) - sum(self.muon.values())

    def eaten(self, loosest: float) -> str:
        """Say whether Muon's update takes more, beyond AdamW's, than was saved: "yes", "no" or "perhaps".

        loosest: by what factor a bound of Muon's update was found to exceed the measurement. "no" follows from the
        bound; "yes" supposes that the update takes at least bound / loosest.
        """
        if self.muon_transient <= self.saved:
            return "no"
        return "yes" if self.muon_transient / loosest - self.adamw_transient > self.saved else "perhaps"


def plan_memory(model: Shape, dp: int, tp: int = 1, bucket_size: int = DEFAULT_BUCKET_SIZE) -> MemoryPlan:
    """Return the plan for a published model on a dp x tp grid. Raises ValueError where `tp` does not cut its heads."""
    specs, muon = model.specs(tp)
    layout, matrices = plan(specs, dp, bucket_size), frozenset(muon)

    def transient(rank: int, muon: frozenset[int]) -> int:
        return predict_transient(layout, tp, rank, muon, compute_dtype="bfloat16", native_reduce_scatter=True)

    worst = max(range(dp), key=lambda rank: transient(rank, matrices))
    adamw, muon_states = (predict_shards(layout, worst, chosen) for chosen in (frozenset(), matrices))
    return MemoryPlan(adamw, muon_states, transient(worst, frozenset()), transient(worst, matrices))


def share_of_matrices(model: Shape) -> float:
    """Return which share of a model's parameters Muon moves."""
    return sum(math.prod(weight.shape) for weight in model.weights() if weight.muon) / model.parameters


# ---- What is saved ----------------------------------------------------------------------------------------


def share_lines() -> list[str]:
    """Return h, the share of matrices, and by formula what Muon saves: of the state, with masters, of a whole rank."""
    shares = {f"our shape {name}": _share_of_shape(shape) for name, shape in SHAPES.items()}
    shares |= {model.title: share_of_matrices(model) for model in map(MODELS.__getitem__, SURVEYED)}
    lines = ["      h  saved of state  + masters    D=1    D=8   D=64"]
    for title, h in shares.items():
        ranks = "".join(f"{h * (4 / D) / (6 + 12 / D):>7.1%}" for D in (1, 8, 64))
        lines.append(f"{h:>7.1%}{h / 2:>16.1%}{h / 3:>11.1%}{ranks}  {title}")
    return lines


def _share_of_shape(shape: Workload) -> float:
    states = BASELINES["muon"].predict_states(shape.shared_by(1), 1, 1, 0)
    return states["momentum"] / (states["momentum"] + states["exp_avg"])


def saving_lines(found: Found, shape: str = "even", dtype: str = "bfloat16") -> list[str]:
    """Return what Muon saves on the grids where `found` has steps: the mean over DP ranks, as predicted and counted."""
    grids = dict.fromkeys((row["dp"], row["tp"]) for row in found["rows"] if row["shape"] == shape)
    lines = ["  state  + masters  whole rank"]
    for dp, tp in grids:
        totals = [_totals(name, shape, dtype, dp, tp) for name in OURS]
        saved = [1 - after / before for before, after in zip(*totals, strict=True)]
        lines.append(f"{saved[0]:>7.1%}{saved[1]:>11.1%}{saved[2]:>12.1%}  {dp} DP x {tp} TP")
    return lines


def _totals(name: str, shape: str, dtype: str, dp: int, tp: int) -> list[int]:
    """Return the bytes of SUMS, over all DP ranks."""
    workload = replace(SHAPES[shape], dtype=dtype).shared_by(dp)
    ranks = [BASELINES[name].predict_states(workload, dp, tp, rank) for rank in range(dp)]
    return [sum(states[kind] for states in ranks for kind in kinds) for kinds in SUMS.values()]


# ---- What a step takes ------------------------------------------------------------------------------------


def update_lines(found: Found, dtype: str = "bfloat16") -> list[str]:
    """Return the worst moment of every baseline's update on 4 DP ranks, beside its bound, in bytes."""
    lines = ["  measured         bound"]
    for row in found["rows"]:
        if (row["dp"], row["tp"], row["shape"], row["dtype"]) == (4, 1, "even", dtype):
            bound = "counted only" if row["bound"] is None else f"{row['bound']:,}"
            lines.append(f"{row['transient']:>10,}{bound:>14}  {BASELINES[row['contender']].title}")
    return lines


def slack(found: Found, baseline: str) -> tuple[float, float]:
    """Return the least and the largest bound / measured of a baseline's update, over all grids and buckets."""
    rows = [row for row in [*found["rows"], *found["sweep"]] if row["contender"] == baseline]
    ratios = [row["bound"] / row["transient"] for row in rows]
    return min(ratios), max(ratios)


def bucket_rows(found: Found) -> list[tuple[int, int, int, int]]:
    """Return (elements in the largest bucket, beyond AdamW, its bound, saved) per bucket size; means over ranks, bytes.

    Beyond AdamW: what Muon's update takes at its worst moment, less what AdamW's does. bound: Muon's, less the same.
    """
    adamw, muon = ([row for row in found["sweep"] if row["contender"] == name] for name in OURS)
    pairs = {a["largest_bucket"]: (a, m) for a, m in zip(adamw, muon, strict=True)}
    return [
        (
            size,
            m["mean_transient"] - a["mean_transient"],
            m["bound"] - a["mean_transient"],
            a["mean_kept"] - m["mean_kept"],
        )
        for size, (a, m) in pairs.items()
    ]


def bucket_curves(found: Found) -> dict[str, Curve]:
    """Return `bucket_rows` as curves: thousands of elements, megabytes."""
    columns = list(zip(*bucket_rows(found), strict=True))
    x = [size / 1e3 for size in columns[0]]
    names = ("beyond AdamW", "its bound", "saved")
    return {name: (x, [size / 1e6 for size in sizes]) for name, sizes in zip(names, columns[1:], strict=True)}


def bucket_lines(found: Found) -> list[str]:
    """Return `bucket_rows` as a table: is what was saved eaten?"""
    lines = ["beyond AdamW      saved  eaten   in the bucket"]
    for size, taken, _, saved in bucket_rows(found):
        lines.append(f"{taken:>12,}{saved:>11,}  {'yes' if taken > saved else 'no':<5}{size:>16,}")
    return lines


def published_lines(found: Found) -> list[str]:
    """Return what published models save and what Muon's update takes at most, where a rank fits into 80 GB."""
    loosest = slack(found, "muon")[1]
    lines = ["   saved  update <=  eaten        kept"]
    for model in map(MODELS.__getitem__, SURVEYED):
        for dp, tp in PUBLISHED_GRIDS:
            planned = plan_memory(model, dp, tp, BUCKET_RULES["megatron"](dp)) if model.permits(tp) else None
            if planned and (kept := sum(planned.adamw.values())) <= ACCELERATOR:
                sizes = f"{in_bytes(planned.saved):>8}{in_bytes(planned.muon_transient):>11}"
                lines.append(f"{sizes}  {planned.eaten(loosest):<7}{in_bytes(kept):>10}  {model.title}, {dp} x {tp}")
    return lines


def batch_lines(found: Found) -> list[str]:
    """Return what Muon saves of the peak of a whole step on rank 0, with more and more tokens."""
    lines = ["saved  AdamW peak  Muon peak  activations    update  tokens"]
    for tokens, group in groupby(found["batches"], key=lambda row: row["tokens_per_rank"]):
        pair = {row["contender"]: row for row in group}
        adamw, muon = (pair[name]["peak"] for name in OURS)
        stages = pair["muon"]["stages"]
        update = max(size for stage, size in stages.items() if stage not in ("forward", "backward"))
        sizes = zip((adamw, muon, max(stages["forward"], stages["backward"]), update), (12, 11, 13, 10), strict=True)
        columns = "".join(f"{in_bytes(size):>{width}}" for size, width in sizes)
        lines.append(f"{(adamw - muon) / adamw:>5.1%}{columns}{tokens:>8,}")
    return lines
