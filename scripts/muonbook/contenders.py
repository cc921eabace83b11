"""Who is weighed: part III's six baselines; the paper's layouts of Muon beside its proof of concept's; FSDP2.

Muon's layouts are those of `muonbook.measure.muon_variants`. AdamW and MuonW on FSDP2 keep float32 shards of
everything, which a bf16 model casts when it gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from distmuon.optim.fast_paths import BATCHED_ON_CPU
from distmuon.optim.strategies.costs import iteration_bytes
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ITEM_BYTES, Layout, ParamSpec
from distmuon.verify.model_states import ModelStates, predict_rows, predict_shards
from distmuon.verify.prediction import STATISTICS_BYTES, adamw_temporaries, predict_transient
from muonbook.measure.baselines import BASELINES, Trainer, make_fsdp2
from muonbook.measure.muon_variants import MUON_VARIANTS
from muonbook.measure.workload import Workload
from muonbook.planner.parts.fsdp_worlds import FsdpPart
from muonbook.ways import TITLES


class WeighedContender(NamedTuple):
    """One way to train. title: for tables.

    make: (workload, grid) -> Trainer; collective. states: (workload, dp, tp, dp_rank) -> what that rank keeps. update:
    (workload, dp, tp, dp_rank, compute_dtype, foreach) -> an upper bound, in bytes, of what its update allocates at its
    worst moment; None where DTensor decides. foreach: see `adamw_temporaries`. over_tp: may be cut over TP. in_float64:
    may train a float64 model; what is planned of FSDP2 has float32 shards.
    """

    title: str
    make: Callable[[Workload, Grid], Trainer]
    states: Callable[[Workload, int, int, int], ModelStates]
    update: Callable[[Workload, int, int, int, str, bool], int | None]
    over_tp: bool = True
    in_float64: bool = True

    def admits(self, workload: Workload, dp: int, tp: int) -> bool:
        """Say whether this contender can train `workload` on a dp x tp grid."""
        fits = workload.fits(dp, tp) and (self.over_tp or tp == 1)
        return fits and (self.in_float64 or workload.dtype != "float64")


# ---- Part III's six ---------------------------------------------------------------------------------------


def _baseline(name: str) -> WeighedContender:
    baseline = BASELINES[name]

    def make(workload: Workload, grid: Grid) -> Trainer:
        return baseline.make(workload, grid, None)

    def update(workload: Workload, dp: int, tp: int, dp_rank: int, compute_dtype: str, foreach: bool) -> int | None:
        layout, muon, _ = workload.plan(dp, tp, baseline.algorithm)
        if baseline.states is predict_shards:
            return _sharded_update(layout, tp, dp_rank, muon, "gather_all", workload, compute_dtype, foreach)
        return None if baseline.states is predict_rows else _replicas_update(layout, muon, compute_dtype, foreach)

    return WeighedContender(baseline.title, make, baseline.predict_states, update, baseline.over_tp)


def _sharded_update(
    layout: Layout,
    tp: int,
    dp_rank: int,
    muon: Collection[int],
    strategy: str,
    workload: Workload,
    compute_dtype: str,
    foreach: bool,
) -> int:
    dtypes: dict[str, Any] = {"gather_dtype": workload.gather_dtype, "compute_dtype": compute_dtype}
    return predict_transient(layout, tp, dp_rank, muon, strategy, foreach=foreach, **dtypes)


def _replicas_update(layout: Layout, muon: Collection[int], compute_dtype: str, foreach: bool) -> int:
    """Return what DDP's optimizers allocate: AdamW's temporaries, or our single-device Muon's largest batch."""
    specs = [spec for index, spec in enumerate(layout.specs) if index not in muon]
    adamw = adamw_temporaries((spec.numel * ITEM_BYTES[spec.dtype] for spec in specs), foreach)
    matrices = [layout.specs[index] for index in muon]
    return max(adamw, _whole_matrices(matrices, ITEM_BYTES[compute_dtype])) + STATISTICS_BYTES * (len(layout.specs) + 1)


def _whole_matrices(specs: list[ParamSpec], compute: int) -> int:
    """Return what our single-device Muon allocates for its largest batch, and one matrix not yet rounded to bf16."""
    batches: dict[Any, int] = {}
    for number, spec in enumerate(specs):
        key = spec.shape if spec.numel <= BATCHED_ON_CPU else number
        batches[key] = batches.get(key, 0) + spec.numel
    largest = max((spec.numel * ITEM_BYTES[spec.dtype] for spec in specs), default=0)
    gathered = ITEM_BYTES["bfloat16"]  # twice: the matrices, and their batch
    return (2 * gathered + iteration_bytes(gathered, compute)) * max(batches.values(), default=0) + largest


# ---- Muon's layouts ---------------------------------------------------------------------------------------


def _muon(name: str) -> WeighedContender:
    algorithm = MUON_VARIANTS[name]

    def states(workload: Workload, dp: int, tp: int, dp_rank: int) -> ModelStates:
        layout, muon = algorithm.plan(workload, dp, tp)
        return predict_shards(layout, dp_rank, muon)

    def update(workload: Workload, dp: int, tp: int, dp_rank: int, compute_dtype: str, foreach: bool) -> int:
        layout, muon = algorithm.plan(workload, dp, tp)
        return _sharded_update(layout, tp, dp_rank, muon, algorithm.strategy, workload, compute_dtype, foreach)

    return WeighedContender(algorithm.title, algorithm.make, states, update)


# ---- FSDP2 ------------------------------------------------------------------------------------------------


def _fsdp2(title: str, muonw: bool) -> WeighedContender:
    """Return AdamW or MuonW on FSDP2, layer by layer, in float32 shards; not over TP here."""

    def part(workload: Workload, dp: int) -> FsdpPart:
        layout, muon, _ = replace(workload, dtype="float32").plan(dp, 1, "muon" if muonw else "adamw")
        return FsdpPart(layout.specs, frozenset(muon), dp, 1, [""] * len(layout.specs))

    def make(workload: Workload, grid: Grid) -> Trainer:
        policy = MixedPrecisionPolicy(param_dtype=workload.torch_dtype, reduce_dtype=torch.float32)
        return make_fsdp2(replace(workload, dtype="float32"), grid, muonw, mp_policy=policy)

    def states(workload: Workload, dp: int, tp: int, dp_rank: int) -> ModelStates:
        return {kind: int(column[dp_rank]) for kind, column in part(workload, dp).states().items()}

    def update(workload: Workload, dp: int, tp: int, dp_rank: int, compute_dtype: str, foreach: bool) -> int:
        planned = part(workload, dp)
        rows = (-(-spec.shape[0] // dp) * (spec.numel // spec.shape[0]) for spec in planned.specs)
        elementwise = ITEM_BYTES["float32"] * adamw_temporaries(rows, foreach) + STATISTICS_BYTES * len(planned.specs)
        return elementwise + int(planned.step_bytes(ITEM_BYTES[compute_dtype])[dp_rank])

    return WeighedContender(title, make, states, update, over_tp=False, in_float64=False)


CONTENDERS: dict[str, WeighedContender] = {
    **{name: _baseline(name) for name in BASELINES},
    **{name: _muon(name) for name in ("muon_single", "muon_flat", "muon_cut", "muon_owner")},
    "adamw_fsdp2": _fsdp2(TITLES["adamw_fsdp2"], muonw=False),
    "muonw": _fsdp2(TITLES["muonw"], muonw=True),
}
# On equal terms: whole parameters and gradients, masters and state in 1/D shards.
ZERO1 = ("zero1", "muon_single", "muon", "muon_flat", "muon_cut", "muon_owner")
TRIED = (*ZERO1, "adamw_fsdp2", "muonw")


def admitted(workload: Workload, dp: int, tp: int, names: Collection[str] = CONTENDERS) -> list[str]:
    """Return those that can train this workload on this grid."""
    return [name for name in names if CONTENDERS[name].admits(workload, dp, tp)]
