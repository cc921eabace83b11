"""The run behind "0.57x the communication of AdamW", planned with our map: what it compared, and a fair comparison.

The run is the one of the report "Reproducing and Validating Distributed Muon" (Wei 2025). Its model is five loose
matrices, float32; shapes and cuts are those of the function `gen_param_and_grads`, and of `tp_dims`, in
analysis_scripts/muon_vs_adam.py of JenWei0312/muon-distributed-reproducibility (commit 3af45f5). The sizes that its
public traces record for each collective are those planned here: see tests/book/measure/test_formulas.py. What becomes
of the 0.57 is told in book/claims.md.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from distmuon.optim import strategies
from distmuon.sharding.gradients import STATISTICS_LABEL
from distmuon.sharding.layout import FLAT, Layout, ParamSpec
from distmuon.sharding.ledger import Ledger
from distmuon.verify.prediction import predict_step
from muonbook.measure.formulas import ddp_adamw

MATRICES: tuple[tuple[tuple[int, int], int | None], ...] = (  # whole shape, tp_split_dim
    ((4096, 4096), 0),
    ((1024, 324), 1),
    ((456, 1024), None),
    ((676, 876), 1),
    ((128, 128), 0),
)


def plan_model(dp: int, tp: int, strategy: str = "gather_all") -> Layout:
    """Lay the report's model out on a dp x tp grid, in one bucket, as its script does; or as a strategy wants it."""
    specs = []
    for number, (shape, cut) in enumerate(MATRICES):
        local = tuple(n // tp if dim == cut else n for dim, n in enumerate(shape))
        specs.append(ParamSpec(f"matrix {number}", local, "float32", cut if tp > 1 else None))
    return strategies.planner(strategy)(specs, range(len(specs)), dp, tp, FLAT)


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one rank sends per step. gathers: of Muon's momentum alone; over_tp: those of them that travel over
    TP. adamw, muon: whole ZeRO-1 steps."""

    gathers: int
    over_tp: int
    adamw: int
    muon: int


def steps(dp: int, tp: int) -> list[StepBytes]:
    """Return what each DP rank sends on a dp x tp grid: gradients, momentum and parameters; without the norms."""
    layout = plan_model(dp, tp)
    everything = range(len(layout.specs))
    found = []
    for rank in range(dp):
        muon, adamw = predict_step(layout, tp, rank, everything), predict_step(layout, tp, rank)
        gathers = [(entry.group, t.sent_bytes) for entry, t in muon if entry.label.startswith("momentum")]
        sent, over_tp = sum(size for _, size in gathers), sum(size for group, size in gathers if group == "tp")
        found.append(
            StepBytes(sent, over_tp, *(ledger.total().sent_bytes - _norms(ledger) for ledger in (adamw, muon)))
        )
    return found


def over_adamw(dp: int, tp: int, strategy: str) -> float:
    """Return Muon / AdamW, whole ZeRO-1 steps in bytes, flat, without the norms; mean over ranks."""
    layouts = plan_model(dp, tp, strategy), plan_model(dp, tp)
    everything, sent = range(len(layouts[0].specs)), [0, 0]
    for rank, tp_rank in itertools.product(range(dp), range(tp)):
        for side, (layout, muon) in enumerate(zip(layouts, (everything, ()), strict=True)):
            ledger = predict_step(layout, tp, rank, muon, strategy, tp_rank=tp_rank)
            sent[side] += ledger.total().sent_bytes - _norms(ledger)
    return sent[0] / sent[1]


def all_reduces(dp: int) -> int:
    """Return what a rank sends to all-reduce every gradient in float32 over `dp` ranks."""
    return int(ddp_adamw(dp, sum(spec.numel for spec in plan_model(dp, 1).specs), g=4))


def _norms(ledger: Ledger) -> int:
    return ledger.total(label=STATISTICS_LABEL).sent_bytes
