"""Which grid sends least, in frames: every grid of some ranks with more and more tokens, and the least walks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_bars, draw_bars
from muonbook.figures.style import ACCENT, COLD, MUTED, in_bytes
from muonbook.measure.baselines import predict_activations, predict_muon, predict_zero1
from muonbook.measure.workload import Workload

PARTS = {"gradients, parameters": MUTED, "Muon's momentum": ACCENT, "activations": COLD}  # part -> colour
NOTE = "Bytes that a rank sends per step, predicted, mean over ranks. Muon is bucketed."


def sent_by_part(workload: Workload, dp: int, tp: int) -> dict[str, float]:
    """Return {part of `PARTS`: bytes that a rank sends in a step, mean over DP ranks; TP ranks send alike}."""
    _, _, model = workload.plan(dp, tp)
    found = {"activations": float(predict_activations(model, workload, dp, tp).total().sent_bytes)}
    totals = {}
    for name, predict in {"adamw": predict_zero1, "muon": predict_muon}.items():
        totals[name] = sum(predict(workload, dp, tp, rank).total().sent_bytes for rank in range(dp)) / dp
    found["gradients, parameters"] = totals["adamw"] - found["activations"]
    found["Muon's momentum"] = totals["muon"] - totals["adamw"]
    return {part: found[part] for part in PARTS}


def least(sent: dict[str, dict[str, float]]) -> str:
    """Return the name of the grid that sends least."""
    return min(sent, key=lambda grid: sum(sent[grid].values()))


def sent_by_grid(workload: Workload, grids: Sequence[tuple[int, int]], tokens: int) -> dict[str, dict[str, float]]:
    """Return {grid: `sent_by_part`} with so many tokens per step; 0: without activations.

    Raises ValueError where a grid's DP ranks cannot share the sequences out.
    """
    sequences, rest = divmod(tokens, workload.context)
    if rest or any(sequences % dp for dp, _ in grids):
        raise ValueError(f"{tokens} tokens are no whole number of sequences of {workload.context} for each DP rank.")
    batch = replace(workload, sequences=sequences)
    return {f"{dp} DP × {tp} TP": sent_by_part(batch, dp, tp) for dp, tp in grids}


def frames_of_grids(workload: Workload, grids: Sequence[tuple[int, int]], batches: Sequence[int]) -> list[Frame]:
    """Return one frame per batch, all on one scale. batches: tokens per step; errors as for `sent_by_grid`."""
    of = {tokens: sent_by_grid(workload, grids, tokens) for tokens in batches}
    most = max(sum(parts.values()) for sent in of.values() for parts in sent.values())
    frames = []
    for tokens, sent in of.items():
        best = least(sent)
        title = f"{f'{tokens:,} tokens' if tokens else 'No activations'}: {best} sends least"
        look: dict[str, Any] = {"title": title, "note": NOTE, "colours": PARTS, "most": most}
        caption = f"Least, on {best}: {in_bytes(sum(sent[best].values()))}."
        frames.append(Frame(draw_bars(sent, **look), describe_bars(sent, **look), caption))
    return frames
