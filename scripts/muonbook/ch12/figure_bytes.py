"""Rows for chapter 12's bars: what each baseline sends, and what for; and Muon over AdamW, grid by grid."""

from __future__ import annotations

from distmuon.sharding.gradients import STATISTICS_LABEL
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE
from distmuon.sharding.ledger import Entry, Ledger
from muonbook.measure import formulas
from muonbook.measure.baselines import admitted
from muonbook.measure.workload import Workload

GRADIENTS, PARAMETERS, ACTIVATIONS = "gradients", "parameters", "activations, TP"
PURPOSES = (GRADIENTS, PARAMETERS, "momentum, DP", ACTIVATIONS, "momentum, TP")
LARGE = Workload(width=1024, layers=12, heads=16, sequences=64, bucket_size=DEFAULT_BUCKET_SIZE)  # 151 million


def purpose(entry: Entry) -> str:
    """Return what a collective is for; the few bytes of the gradients' norms count with the gradients."""
    kind = entry.label.partition(",")[0]
    if entry.label == STATISTICS_LABEL or kind == GRADIENTS:
        return GRADIENTS
    if kind == PARAMETERS:
        return PARAMETERS
    return f"momentum, {entry.group.upper()}" if kind == "momentum" else ACTIVATIONS


def sent_by_purpose(ledger: Ledger) -> dict[str, float]:
    """Return {purpose: bytes sent}, for all purposes."""
    found = dict.fromkeys(PURPOSES, 0.0)
    for entry, traffic in ledger:
        found[purpose(entry)] += traffic.sent_bytes
    return found


def baseline_rows(workload: Workload, dp: int, tp: int) -> dict[str, dict[str, float]]:
    """Return what DP rank 0 sends in one step, by baseline and purpose, for those that can be predicted."""
    return {
        baseline.title: sent_by_purpose(baseline.predict(workload, dp, tp, 0))
        for baseline in admitted(workload, dp, tp).values()
        if baseline.predict is not None
    }


def ratio_rows(workload: Workload, ranks: int) -> dict[str, dict[str, float]]:
    """Return Muon / ZeRO-1 AdamW, matrices alone, fp32, in its three parts for every grid of `ranks` ranks that fits.

    From the map of each grid: its s decides how much the TP term is.
    """
    rows = {}
    for tp in (t for t in range(1, ranks) if ranks % t == 0 and workload.fits(ranks // t, t)):
        dp = ranks // tp
        layout, muon, _ = workload.plan(dp, tp)
        s = formulas.mean_owners(layout, muon)
        base, whole = formulas.ratio(dp, 1, 4, 4, 2, 1), formulas.ratio(dp, tp, 4, 4, 2, s)
        parts = {"ZeRO-1 AdamW": 1.0, "DP gather": float(base - 1), "TP gather": float(whole - base)}
        rows[f"{dp} DP × {tp} TP, s = {float(s):.2f}"] = parts
    return rows
