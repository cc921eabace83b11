"""Chapter 12's bars and curves: what a step sends, and what for; Muon over AdamW, as matrices are cut and D grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmuon.sharding.gradients import STATISTICS_LABEL
from distmuon.sharding.ledger import Entry, Ledger
from muonbook.ch12.contenders import ALGORITHMS, CONTENDERS
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_bars, draw_bars
from muonbook.measure.workload import Workload
from muonbook.planner.model_shapes import find_shape
from muonbook.planner.owned_worlds import plan_part
from muonbook.planner.parts import every_rank
from muonbook.planner.planned_worlds import BUCKET_RULES

SHOWN = ("zero1", "muon", "muon_flat", "muon_cut", "muon_owner")
GRADIENTS, PARAMETERS = "gradients", "parameters"
PURPOSES = (GRADIENTS, PARAMETERS, "momentum over DP", "momentum over TP or mesh")
ACTIVATIONS = "activations"
CURVES = {"muon": "bucketed", "muon_flat": "flat", "muon_cut": "flat + cut", "muon_owner": "owner"}


# ---- What a step sends ------------------------------------------------------------------------------------


def purpose(entry: Entry) -> str:
    """Return what a collective is for; the few bytes of the gradients' norms count with the gradients.

    Momentum to owners and updates back are one purpose: whole matrices.
    """
    kind = entry.label.partition(",")[0]
    if entry.label == STATISTICS_LABEL or kind == GRADIENTS or entry.op == "reduce_scatter":
        return GRADIENTS
    if kind in ("momentum", "updates"):
        return PURPOSES[2 if entry.group == "dp" else 3]
    return ACTIVATIONS if entry.group == "tp" else PARAMETERS


def sent_by_purpose(ledger: Ledger) -> dict[str, float]:
    """Return {purpose: bytes sent}, for all purposes, and activations."""
    found = dict.fromkeys((*PURPOSES, ACTIVATIONS), 0.0)
    for entry, traffic in ledger:
        found[purpose(entry)] += traffic.sent_bytes
    return found


def step_rows(workload: Workload, dp: int, tp: int, names: Sequence[str] = SHOWN) -> dict[str, dict[str, float]]:
    """Return what a rank is predicted to send in one step, mean over ranks, by contender and purpose.

    Without activations, which all have in common. names: of `CONTENDERS` with a prediction.
    """
    ranks = [(d, t) for d in range(dp) for t in range(tp)]
    rows = {}
    for contender in (CONTENDERS[name] for name in names):
        assert contender.predict is not None
        rows[contender.title] = mean = dict.fromkeys(PURPOSES, 0.0)
        for rank in ranks:
            sent = sent_by_purpose(contender.predict(workload, dp, tp, rank))
            for what in PURPOSES:
                mean[what] += sent[what] / len(ranks)
    return rows


def step_frames(workload: Workload, grids: Sequence[tuple[int, int]]) -> list[Frame]:
    """Return one frame per grid, all on one scale."""
    of = {}
    for dp, tp in grids:
        rows = step_rows(workload.shared_by(dp), dp, tp)
        of[dp, tp] = {
            name: {what.removesuffix(" or mesh"): sent for what, sent in row.items()} for name, row in rows.items()
        }
    most = max(sum(row.values()) for rows in of.values() for row in rows.values())
    frames = []
    for (dp, tp), rows in of.items():
        words: dict[str, Any] = dict(
            title=f"One step on {dp} DP × {tp} TP ranks", note="Bytes that a rank sends, predicted."
        )
        over = {name: sum(row.values()) / sum(rows["AdamW, ZeRO-1"].values()) for name, row in rows.items()}
        caption = "; ".join(f"{name.removeprefix('Muon, ')} {over[name]:.2f}" for name in rows if "Muon," in name)
        caption = f"Over ZeRO-1 AdamW: {caption}."
        frames.append(Frame(draw_bars(rows, **words, most=most), describe_bars(rows, **words), caption))
    return frames


# ---- Muon over ZeRO-1 AdamW -------------------------------------------------------------------------------


def growth_curves(model: str, tp: int, ranks: Sequence[int]) -> dict[str, tuple[list[int], list[float]]]:
    """Return {algorithm: (D, Muon / ZeRO-1 AdamW)} of a published model, planned on D x `tp` ranks, D of `ranks`.

    All parameters, in the paper's dtypes; buckets are Megatron-LM's. Bytes are means over ranks, to the byte.
    """
    specs, muon = find_shape(model).specs(tp, "float32")
    found: dict[str, tuple[list[int], list[float]]] = {title: ([], []) for title in CURVES.values()}
    for dp in ranks:
        for name, algorithm in ALGORITHMS.items():
            size = BUCKET_RULES["flat" if algorithm.flat else "megatron"](dp)
            world = plan_part(specs, muon, dp, tp, size, algorithm.strategy)
            mine, adamw = (sum(float(a.mean()) for a in every_rank.sent(world, m).values()) for m in (True, False))
            found[CURVES[name]][0].append(dp)
            found[CURVES[name]][1].append(mine / adamw)
    return found


def beyond_adamw(models: Sequence[str], ranks: int) -> dict[str, dict[str, float]]:
    """Return {model: {algorithm: what Muon sends beyond ZeRO-1 AdamW, in % of it}} without TP, as `growth_curves`."""
    found = {}
    for model in models:
        curves = growth_curves(model, 1, [ranks])
        found[find_shape(model).title] = {name: round(100 * (ratio - 1), 2) for name, (_, (ratio,)) in curves.items()}
    return found
