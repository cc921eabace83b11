"""Who is counted in chapter 12: part III's baselines, Muon's other algorithms, and two optimizers on FSDP2.

Muon's algorithms are those of `muonbook.measure.muon_variants`. On FSDP2 parameters are gathered in forward and
backward, gradients reduce-scattered; MuonW adds two all-to-alls, momentum to owners and updates back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from distmuon.optim.muonw import MOMENTUM_LABEL, UPDATES_LABEL, MuonW
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from muonbook.measure.baselines import BASELINES, Trainer, make_fsdp2
from muonbook.measure.muon_variants import MUON_VARIANTS, Place
from muonbook.measure.workload import Workload
from muonbook.planner.parts.fsdp_worlds import Dtypes, FsdpPart
from muonbook.planner.stages import units_of
from muonbook.ways import TITLES


@dataclass(frozen=True)
class CountedContender:
    """One way to take a training step.

    make: (workload, grid) -> Trainer; collective. predict: (workload, dp, tp, place) -> Ledger of one step with one
    micro-batch; None where it can only be counted. ledger: (trainer, grid) -> where its own collectives are written;
    None: nowhere. fsdp2: (workload, dp, tp) -> the part of the prediction that FSDP2 calls, of which that ledger does
    not hear. over_tp: may be cut over TP.
    """

    title: str
    make: Callable[[Workload, Grid], Trainer]
    predict: Callable[[Workload, int, int, Place], Ledger] | None
    ledger: Callable[[Trainer, Grid], Ledger] | None = None
    fsdp2: Callable[[Workload, int, int], Ledger] | None = None
    over_tp: bool = True

    def admits(self, workload: Workload, dp: int, tp: int) -> bool:
        """Say whether this contender can train `workload` on a dp x tp grid."""
        return workload.fits(dp, tp) and (self.over_tp or tp == 1)


# ---- Muon, by algorithm -----------------------------------------------------------------------------------

ALGORITHMS = {name: MUON_VARIANTS[name] for name in ("muon", "muon_flat", "muon_cut", "muon_owner")}


# ---- On FSDP2 ---------------------------------------------------------------------------------------------


def _fsdp_part(workload: Workload, dp: int, tp: int) -> FsdpPart:
    layout, muon, _ = workload.plan(dp, tp)
    dtypes = Dtypes(*3 * [workload.dtype])  # of `fully_shard` without a policy
    return FsdpPart(layout.specs, frozenset(muon), dp, tp, units_of(layout.specs), dtypes=dtypes)


def predict_gathers(workload: Workload, dp: int, tp: int) -> Ledger:
    """Return what FSDP2 itself calls in forward and backward."""
    ledger = Ledger()
    gathers = _fsdp_part(workload, dp, tp).gathers().values()
    for op, (calls, payload, _) in zip(("all_gather", "reduce_scatter"), gathers, strict=True):
        if calls:  # units differ in size: one call with the payload of all, and the others
            ledger.record(op, "dp", dp, payload, "FSDP2")
            ledger.record(op, "dp", dp, 0, "FSDP2", calls - 1)
    return ledger


def _predict_fsdp2(muon: bool, workload: Workload, dp: int, tp: int, place: Place) -> Ledger:
    ledger = predict_gathers(workload, dp, tp)
    if muon:
        exchanged = _fsdp_part(workload, dp, tp).exchanged()
        for label, amounts in zip((MOMENTUM_LABEL, UPDATES_LABEL), exchanged, strict=True):
            sent = int(amounts[place[0] * tp + place[1]])
            ledger.record("all_to_all", "mesh", dp * tp, sent, label, sent_bytes=sent)
    return ledger


# ---- All of them ------------------------------------------------------------------------------------------


def _of_grid(trainer: Trainer, grid: Grid) -> Ledger:
    return grid.ledger


def _of_muonw(trainer: Trainer, grid: Grid) -> Ledger:
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, MuonW)
    return optimizer.ledger


def _baseline(name: str) -> CountedContender:
    """Return one of part III's baselines as a contender; DDP reduces in one bucket as large as the model."""
    baseline = BASELINES[name]
    return CountedContender(
        baseline.title,
        baseline.make_whole,
        None if baseline.predict is None else baseline.predict_at,
        _of_grid if name in ("zero1", "muon") else None,  # of the others all is torch's
        over_tp=baseline.over_tp,
    )


def _muon(name: str) -> CountedContender:
    algorithm = ALGORITHMS[name]
    return CountedContender(algorithm.title, algorithm.make, algorithm.predict, _of_grid)


def _on_fsdp2(title: str, muon: bool) -> CountedContender:
    made, predicted = partial(make_fsdp2, muonw=muon), partial(_predict_fsdp2, muon)
    return CountedContender(title, made, predicted, _of_muonw if muon else None, predict_gathers, over_tp=False)


CONTENDERS = {name: _baseline(name) for name in BASELINES} | {
    **{name: _muon(name) for name in ("muon_flat", "muon_cut", "muon_owner")},
    "adamw_fsdp2": _on_fsdp2(TITLES["adamw_fsdp2"], muon=False),
    "muonw_fsdp2": _on_fsdp2(TITLES["muonw"], muon=True),
}


def admitted(workload: Workload, dp: int, tp: int) -> dict[str, CountedContender]:
    """Return the contenders that can train this workload on this grid."""
    return {name: contender for name, contender in CONTENDERS.items() if contender.admits(workload, dp, tp)}
