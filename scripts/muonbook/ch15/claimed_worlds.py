"""Planned worlds in which a claim was made: Moonlight's own batches, the report's ranks, and gather_cut."""

from __future__ import annotations

from typing import Any

from distmuon.sharding.layout import ParamSpec, plan
from distmuon.verify.prediction import predict_step
from muonbook.ch15.cost_model import collectives_of, step_seconds
from muonbook.ch15.links import FABRICS
from muonbook.ch15.planned_steps import Timed, best, seconds
from muonbook.measure import reported
from muonbook.measure.model_shapes import MODELS
from muonbook.measure.planned_worlds import BUCKET_RULES, TIMED_RULE, PlannedWorld, grids, plan_world

MOONLIGHT_RANKS = (16, 32, 64, 128)
MOONLIGHT_TOKENS = (2048 * 8192, 4096 * 8192)  # per step: Liu et al. 2025, section 3.3
REPORTED_GRIDS = ((4, 1), (2, 2), (1, 4))  # of the report's four ranks


def moonlight() -> list[dict[str, Any]]:
    """Return what Muon adds to Moonlight's own batches on NVLink and InfiniBand, by ranks, at the best T.

    extra: over ZeRO-1 AdamW; optimizer: all that is not forward and backward. Both over forward and backward.
    """
    rows, fabric = [], FABRICS["nvlink_infiniband"]
    for ranks in MOONLIGHT_RANKS:
        sizes = {tp: (dp, BUCKET_RULES[TIMED_RULE](dp)) for dp, tp in grids(MODELS["moonlight"], ranks)}
        worlds = {tp: Timed.of(plan_world(MODELS["moonlight"], dp, tp, size)) for tp, (dp, size) in sizes.items()}
        fitting = {tp: timed for tp, timed in worlds.items() if timed.fits}
        for tokens in MOONLIGHT_TOKENS:
            tp = best(seconds(fitting, fabric, tokens, "step"))
            step = fitting[tp].step(fabric, tokens)
            row = {"extra": short(step.extra), "optimizer": short(step.optimizer)}
            rows.append({"ranks": ranks, "tokens": tokens, "tp": tp} | row)
    return rows


def reported_world() -> list[dict[str, Any]]:
    """Return what the report's own five matrices ask of four ranks over PCIe, on each grid: see `reported`.

    bytes: of the rank that sends most. seconds: of sending alone, over those of the quickest grid.
    """
    took = {}
    for dp, tp in REPORTED_GRIDS:
        layout = reported.plan_model(dp, tp)
        wires, sizes = FABRICS["pcie_ethernet"].wires(dp, tp), {"dp": dp, "tp": tp, "world": dp * tp}
        ledgers = [predict_step(layout, tp, rank, range(len(layout.specs))) for rank in range(dp)]
        took[dp, tp] = max(step_seconds(0.0, collectives_of(ledger, sizes), wires) for ledger in ledgers)
    return [
        {
            "dp": dp,
            "tp": tp,
            "bytes": max(sent.muon for sent in reported.steps(dp, tp)),
            "seconds": short(took[dp, tp] / min(took.values())),
        }
        for dp, tp in REPORTED_GRIDS
    ]


def gather_cut_340m() -> list[dict[str, Any]]:
    """Return the arithmetic for gather_cut on 12 layers of width 1536 (48 matrices, qkv fused), one bucket, fp32."""
    width, rows = 1536, []
    shapes = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
    specs = [
        ParamSpec(f"{layer}.{name}", (width * a, width * b), "float32")
        for layer in range(12)
        for name, (a, b) in shapes.items()
    ]
    for dp in (2, 8, 32, 64, 256):
        muon = frozenset(range(len(specs)))
        world = PlannedWorld(None, dp, 1, plan(specs, dp, sum(spec.numel for spec in specs)), muon)
        zero1 = world.ledger(muon=False).total(group="dp").sent_bytes
        ratio = (zero1 + world.gather_cut_bytes) / zero1
        rows.append({"dp": dp, "bytes_over_zero1": round(ratio, 3), "redundancy": round(world.redundancy[0], 2)})
    return rows


def short(value: float) -> float:
    """Four digits: the assumptions hold for fewer."""
    return float(f"{value:.4g}")
