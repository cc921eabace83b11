"""The baselines that part III counts, weighs and times, each with what can be said of it before it runs.

Some are wrapped in what is torch's; others are our ZeRO-1 AdamW and, by layout, our distributed Muon. AdamW and MuonW
on FSDP2 keep float32 shards of everything, which a bf16 model casts when it gathers them: parameters are gathered in
forward and backward, gradients reduce-scattered, and MuonW adds two all-to-alls, momentum to owners and updates back.

All start from the same weights and read the same data. Those that keep whole matrices on every rank, or let DTensor
find out, know nothing of our TP layers: with T > 1 their Newton–Schulz would see blocks, so they refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from distmuon.optim import strategies
from distmuon.optim.fast_paths import BATCHED_ON_CPU
from distmuon.optim.muonw import MOMENTUM_LABEL, UPDATES_LABEL, MuonW
from distmuon.optim.strategies.costs import iteration_bytes
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import FLAT, ITEM_BYTES, Layout, ParamSpec
from distmuon.sharding.ledger import Ledger
from distmuon.verify import model_states
from distmuon.verify.model_states import ModelStates
from distmuon.verify.prediction import STATISTICS_BYTES, adamw_temporaries, predict_step, predict_transient
from muonbook.baselines import BASELINES, TITLES
from muonbook.measure import trainers
from muonbook.measure.trainers import Trainer, predict_activations
from muonbook.measure.workload import Workload
from muonbook.planner.parts.fsdp_worlds import Dtypes, FsdpPart
from muonbook.planner.stages import units_of

Place = tuple[int, int]  # (dp_rank, tp_rank)


@dataclass(frozen=True)
class RunnableBaseline:
    """One way to train a `Workload` on a grid.

    title: in tables. make: (workload, grid) -> Trainer; collective. states: (workload, dp, tp, dp_rank) -> what that
    rank keeps. predict: (workload, dp, tp, place) -> Ledger of one step with one micro-batch; raises ValueError where
    torch's own planning decides, so that it can only be counted. update: (workload, dp, tp, dp_rank, compute_dtype,
    foreach) -> an upper bound, in bytes, of what its update allocates at its worst moment; None where DTensor decides.
    foreach: see `adamw_temporaries`.

    ledger: (trainer, grid) -> where its own collectives are written; None: nowhere. fsdp2: (workload, dp, tp) -> the
    part of the prediction that FSDP2 calls, of which that ledger does not hear. over_tp: may be cut over TP.
    in_float64: may train a float64 model. ddp_alone: sends what DDP sends, and nothing else.
    """

    title: str
    make: Callable[[Workload, Grid], Trainer]
    states: Callable[[Workload, int, int, int], ModelStates]
    predict: Callable[[Workload, int, int, Place], Ledger]
    update: Callable[[Workload, int, int, int, str, bool], int] | None = None
    ledger: Callable[[Trainer, Grid], Ledger] | None = None
    fsdp2: Callable[[Workload, int, int], Ledger] | None = None
    over_tp: bool = True
    in_float64: bool = True
    ddp_alone: bool = False

    @property
    def predicted(self) -> bool:
        """Whether what it sends is known before."""
        return self.predict is not only_counted

    def admits(self, workload: Workload, dp: int, tp: int) -> bool:
        """Say whether this baseline can train `workload` on a dp x tp grid."""
        fits = workload.fits(dp, tp) and (self.over_tp or tp == 1)
        return fits and (self.in_float64 or workload.dtype != "float64")


def only_counted(workload: Workload, dp: int, tp: int, place: Place) -> Ledger:
    """Predict nothing. Raises ValueError."""
    raise ValueError("what this one sends is planned by torch; it can only be counted.")


# ---- Sharded by us: AdamW, and Muon by layout -------------------------------------------------------------


class Sharded(NamedTuple):
    """One of our ZeRO-1 optimizers: a strategy and its map.

    elements: of a bucket; FLAT: one bucket for all; None: as the workload asks. algorithm: "muon", or "adamw".
    """

    title: str
    strategy: str
    elements: int | None = None
    algorithm: str = "muon"

    def bucket_size(self, workload: Workload) -> int:
        return workload.bucket_size if self.elements is None else self.elements

    def plan(self, workload: Workload, dp: int, tp: int) -> tuple[Layout, list[int]]:
        """Return the map as the strategy's own planner lays it out, and the indices of Muon's matrices in it."""
        layout, muon, _ = workload.plan(dp, tp, self.algorithm)
        planner = strategies.planner(self.strategy)
        return planner(layout.specs, muon, dp, tp, self.bucket_size(workload)), muon

    def make(self, workload: Workload, grid: Grid) -> Trainer:
        if self.algorithm == "adamw":
            return trainers.make_zero1(workload, grid)
        return trainers.make_strategy(workload, grid, self.strategy, self.bucket_size(workload))

    def predict(self, workload: Workload, dp: int, tp: int, place: Place) -> Ledger:
        """Return what a rank will send in a step with one micro-batch."""
        _, _, model = workload.plan(dp, tp)
        ledger = predict_activations(model, workload, dp, tp)
        ledger.add(self.predict_optimizer(workload, dp, tp, place))
        return ledger

    def predict_optimizer(self, workload: Workload, dp: int, tp: int, place: Place) -> Ledger:
        """Return what the optimizer's step sends, without the model's activations."""
        layout, muon = self.plan(workload, dp, tp)
        return predict_step(layout, tp, place[0], muon, self.strategy, workload.gather_dtype, place[1])

    def states(self, workload: Workload, dp: int, tp: int, dp_rank: int) -> ModelStates:
        layout, muon = self.plan(workload, dp, tp)
        return model_states.predict_shards(layout, dp_rank, muon)

    def update(self, workload: Workload, dp: int, tp: int, dp_rank: int, compute_dtype: str, foreach: bool) -> int:
        layout, muon = self.plan(workload, dp, tp)
        dtypes: dict[str, Any] = {"gather_dtype": workload.gather_dtype, "compute_dtype": compute_dtype}
        return predict_transient(layout, tp, dp_rank, muon, self.strategy, foreach=foreach, **dtypes)

    def runnable(self) -> RunnableBaseline:
        return RunnableBaseline(
            self.title, self.make, self.states, self.predict, self.update, ledger=lambda trainer, grid: grid.ledger
        )


MUON_LAYOUTS = {
    "muon_single": Sharded(*BASELINES["muon_single"], 1),
    "muon": Sharded(*BASELINES["muon"]),
    "muon_flat": Sharded(*BASELINES["muon_flat"], FLAT),
    "muon_cut": Sharded(*BASELINES["muon_cut"], FLAT),
    "muon_owner": Sharded(*BASELINES["muon_owner"]),
}


# ---- Wrapped in what is torch's ---------------------------------------------------------------------------


def _wrapped(
    name: str,
    make: Callable[[Workload, Grid], Trainer],
    predict_states: Callable[..., ModelStates],
    predict: Callable[[Workload, int, int, Place], Ledger],
    ddp_alone: bool = False,
) -> RunnableBaseline:
    """Return AdamW or Muon behind torch's DDP, ZeRO or FSDP2; whole matrices are not cut over TP."""
    algorithm = "muon" if name.startswith("muon") else "adamw"

    def states(workload: Workload, dp: int, tp: int, dp_rank: int) -> ModelStates:
        layout, muon, _ = workload.plan(dp, tp, algorithm)
        return predict_states(layout, dp_rank, muon)

    def update(workload: Workload, dp: int, tp: int, dp_rank: int, compute_dtype: str, foreach: bool) -> int:
        layout, muon, _ = workload.plan(dp, tp, algorithm)
        specs = [spec for index, spec in enumerate(layout.specs) if index not in muon]
        adamw = adamw_temporaries((spec.numel * ITEM_BYTES[spec.dtype] for spec in specs), foreach)
        whole = _whole_matrices([layout.specs[index] for index in muon], ITEM_BYTES[compute_dtype])
        return max(adamw, whole) + STATISTICS_BYTES * (len(layout.specs) + 1)

    bound = None if predict_states is model_states.predict_rows else update  # where DTensor decides
    over_tp = algorithm == "adamw"
    return RunnableBaseline(TITLES[name], make, states, predict, bound, over_tp=over_tp, ddp_alone=ddp_alone)


def _whole_matrices(specs: list[ParamSpec], compute: int) -> int:
    """Return what our single-device Muon allocates for its largest batch, and one matrix not yet rounded to bf16."""
    batches: dict[Any, int] = {}
    for number, spec in enumerate(specs):
        key = spec.shape if spec.numel <= BATCHED_ON_CPU else number
        batches[key] = batches.get(key, 0) + spec.numel
    largest = max((spec.numel * ITEM_BYTES[spec.dtype] for spec in specs), default=0)
    gathered = ITEM_BYTES["bfloat16"]  # twice: the matrices, and their batch
    return (2 * gathered + iteration_bytes(gathered, compute)) * max(batches.values(), default=0) + largest


# ---- On FSDP2, in float32 shards; not over TP here --------------------------------------------------------


def _fsdp_part(workload: Workload, dp: int, algorithm: str) -> FsdpPart:
    layout, muon, _ = replace(workload, dtype="float32").plan(dp, 1, algorithm)
    dtypes = Dtypes("float32", workload.dtype, "float32")
    return FsdpPart(layout.specs, frozenset(muon), dp, 1, units_of(layout.specs), dtypes=dtypes)


def _fsdp2_gathers(workload: Workload, dp: int, tp: int) -> Ledger:
    """Return what FSDP2 itself calls in forward and backward."""
    ledger = Ledger()
    gathers = _fsdp_part(workload, dp, "adamw").gathers().values()
    for op, (calls, payload, _) in zip(("all_gather", "reduce_scatter"), gathers, strict=True):
        if calls:  # units differ in size: one call with the payload of all, and the others
            ledger.record(op, "dp", dp, payload, "FSDP2")
            ledger.record(op, "dp", dp, 0, "FSDP2", calls - 1)
    return ledger


def _of_muonw(trainer: Trainer, grid: Grid) -> Ledger:
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, MuonW)
    return optimizer.ledger


def _on_fsdp2(title: str, algorithm: str) -> RunnableBaseline:
    """Return AdamW or MuonW on FSDP2, layer by layer."""
    part = partial(_fsdp_part, algorithm=algorithm)

    def make(workload: Workload, grid: Grid) -> Trainer:
        policy = MixedPrecisionPolicy(param_dtype=workload.torch_dtype, reduce_dtype=torch.float32)
        return trainers.make_fsdp2(replace(workload, dtype="float32"), grid, algorithm == "muon", mp_policy=policy)

    def states(workload: Workload, dp: int, tp: int, dp_rank: int) -> ModelStates:
        return {kind: int(column[dp_rank]) for kind, column in part(workload, dp).states().items()}

    def predict(workload: Workload, dp: int, tp: int, place: Place) -> Ledger:
        ledger = _fsdp2_gathers(workload, dp, tp)
        if algorithm == "muon":
            exchanged = part(workload, dp).exchanged()
            for label, amounts in zip((MOMENTUM_LABEL, UPDATES_LABEL), exchanged, strict=True):
                sent = int(amounts[place[0]])
                ledger.record("all_to_all", "mesh", dp, sent, label, sent_bytes=sent)
        return ledger

    def update(workload: Workload, dp: int, tp: int, dp_rank: int, compute_dtype: str, foreach: bool) -> int:
        planned = part(workload, dp)
        rows = (-(-spec.shape[0] // dp) * (spec.numel // spec.shape[0]) for spec in planned.specs)
        elementwise = ITEM_BYTES["float32"] * adamw_temporaries(rows, foreach) + STATISTICS_BYTES * len(planned.specs)
        return elementwise + int(planned.step_bytes(ITEM_BYTES[compute_dtype])[dp_rank])

    written = _of_muonw if algorithm == "muon" else None
    return RunnableBaseline(
        title, make, states, predict, update, written, _fsdp2_gathers, over_tp=False, in_float64=False
    )


# ---- All of them ------------------------------------------------------------------------------------------

WHOLE, PARTITION = model_states.predict_replicas, model_states.predict_partition
RUNNABLE: dict[str, RunnableBaseline] = {
    "ddp": _wrapped("ddp", trainers.make_ddp, WHOLE, trainers.predict_ddp, ddp_alone=True),
    "zero1": Sharded(TITLES["zero1"], "gather_all", algorithm="adamw").runnable(),
    "torch_zero": _wrapped("torch_zero", trainers.make_torch_zero, PARTITION, trainers.predict_torch_zero),
    "muon_single": MUON_LAYOUTS["muon_single"].runnable(),
    "muon": MUON_LAYOUTS["muon"].runnable(),
    "muon_ddp": _wrapped("muon_ddp", trainers.make_muon_ddp, WHOLE, trainers.predict_ddp, ddp_alone=True),
    "muon_fsdp2": _wrapped("muon_fsdp2", trainers.make_muon_fsdp2, model_states.predict_rows, only_counted),
    **{name: MUON_LAYOUTS[name].runnable() for name in ("muon_flat", "muon_cut", "muon_owner")},
    "adamw_fsdp2": _on_fsdp2(TITLES["adamw_fsdp2"], "adamw"),
    "muonw": _on_fsdp2(TITLES["muonw"], "muon"),
}
# On equal terms: whole parameters and gradients, masters and state in 1/D shards.
ZERO1 = ("zero1", "muon_single", "muon", "muon_flat", "muon_cut", "muon_owner")
TRIED = (*ZERO1, "adamw_fsdp2", "muonw")


def admitted(workload: Workload, dp: int, tp: int, names: Collection[str] = RUNNABLE) -> list[str]:
    """Return those that can train this workload on this grid."""
    return [name for name in names if RUNNABLE[name].admits(workload, dp, tp)]
