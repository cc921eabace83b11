"""Chapter 12's bars: what a step sends, and what for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmuon.sharding.gradients import STATISTICS_LABEL
from distmuon.sharding.ledger import Entry, Ledger
from muonbook.ch12.contenders import CONTENDERS
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_bars, draw_bars
from muonbook.figures.style import CARD, COLD, PADDING, mix
from muonbook.measure.workload import Workload
from muonbook.ways import TITLES

SHOWN = ("zero1", "muon", "muon_flat", "muon_cut", "muon_owner")
GRADIENTS, PARAMETERS = "gradients", "parameters"
PURPOSES = (GRADIENTS, PARAMETERS, "momentum over DP", "momentum over TP or mesh")
ACTIVATIONS = "activations"
BEYOND = "padding"  # gradients and parameters beyond those of AdamW, which keeps the same ones
COLOURS = {GRADIENTS: COLD, PARAMETERS: mix(COLD, CARD, 0.45), BEYOND: PADDING}


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
    of = {(dp, tp): _padding_apart(step_rows(workload.shared_by(dp), dp, tp)) for dp, tp in grids}
    most = max(sum(row.values()) for rows in of.values() for row in rows.values())
    frames = []
    for (dp, tp), rows in of.items():
        words: dict[str, Any] = dict(
            title=f"One step on {dp} DP × {tp} TP ranks", note="Bytes that a rank sends, predicted.", colours=COLOURS
        )
        over = {name: sum(row.values()) / sum(rows[TITLES["zero1"]].values()) for name, row in rows.items()}
        caption = "; ".join(f"{name} {over[name]:.2f}" for name in rows if name != TITLES["zero1"])
        caption = f"Over ZeRO-1 AdamW: {caption}."
        frames.append(Frame(draw_bars(rows, **words, most=most), describe_bars(rows, **words), caption))
    return frames


def _padding_apart(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return rows of ZeRO-1 optimizers in which gradients and parameters are at most AdamW's, and the rest padding."""
    adamw, found = rows[TITLES["zero1"]], {}
    for name, row in rows.items():
        found[name] = {what.removesuffix(" or mesh"): sent for what, sent in row.items()}
        found[name] |= {what: min(row[what], adamw[what]) for what in (GRADIENTS, PARAMETERS)}
        found[name][BEYOND] = sum(row.values()) - sum(found[name].values())
    return found
