"""One step's memory as a picture: what stands, what comes and goes above it, and the moves that make it come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.verify.model_states import ModelStates
from distmuon.verify.storage_tracker import Moment
from muonbook.figures.style import (
    ACCENT,
    CARD,
    INK,
    MARGIN,
    MUTED,
    ROW,
    TEXT,
    WIDTH,
    Block,
    box,
    heading,
    in_bytes,
    inset,
    mix,
    page,
    put,
    text_block,
)

LABELS, HIGH, PITCH = 112.0, 132.0, 15.0  # room for the names of the moves; of the plot; from one move to the next
GROUPS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "masters": ("masters",),
    "state": ("momentum", "exp_avg", "exp_avg_sq", "counters"),
}
SHADES = {
    "parameters": mix(INK, CARD, 0.3),
    "gradients": mix(MUTED, CARD, 0.45),
    "masters": mix(MUTED, CARD, 0.65),
    "state": mix(MUTED, CARD, 0.8),
}


def draw_step_memory(
    steps: Mapping[str, tuple[ModelStates, Sequence[Moment]]], title: str = "", note: str = ""
) -> Figure:
    """Draw whole steps, one below the other on one scale of bytes.

    steps: name -> (bytes kept per kind, the step's history beyond them). To the right runs the number of operators, not
    time. Raises ValueError for no steps, or one without history.
    """
    if not steps or not all(history for _, history in steps.values()):
        raise ValueError("a picture of memory needs a step, and a history of each.")
    top_bytes = 1.08 * max(sum(states.values()) + max(m.alive for m in history) for states, history in steps.values())
    blocks = heading(title, note)
    everything = [states for states, _ in steps.values()]
    blocks.append(
        _key([name for name, kinds in GROUPS.items() if any(states[k] for states in everything for k in kinds)])
    )
    for name, (states, history) in steps.items():
        blocks += [text_block(f"\n{name}", TEXT), _plot(states, history, top_bytes), _moves(history)]
    return page(blocks)


def describe_step_memory(
    steps: Mapping[str, tuple[ModelStates, Sequence[Moment]]], title: str = "Memory over one step", note: str = ""
) -> str:
    """Return alt text for `draw_step_memory`: what stands, and where the step is at its highest."""
    told = []
    for name, (states, history) in steps.items():
        peak = max(history, key=lambda moment: moment.alive)
        told.append(
            f"{name}: {in_bytes(sum(states.values()))} stand, at most {in_bytes(peak.alive)} more, in {peak.stage}"
        )
    return f"{title.rstrip('.')}. {'; '.join(told)}."


def _key(names: Sequence[str]) -> Block:
    looks = {name: SHADES[name] for name in names} | {"for a moment": ACCENT}

    def paint(axes: Axes, top: float) -> None:
        for n, (name, colour) in enumerate(looks.items()):
            x, y = MARGIN + 110 * (n % 3), top + ROW * (n // 3)
            box(axes, x, y + 5, 12, 10, colour)
            put(axes, x + 17, y + 3, name)

    return ROW * -(-len(looks) // 3) + 8, paint


def _plot(states: ModelStates, history: Sequence[Moment], top_bytes: float) -> Block:
    """Stack what is kept, then what is alive beyond it, over the number of operators."""

    def paint(axes: Axes, top: float) -> None:
        plot = inset(axes, LABELS, top, WIDTH - LABELS - MARGIN, HIGH)
        level, x = 0, np.arange(len(history) + 1)
        for name, kinds in GROUPS.items():
            size = sum(states[kind] for kind in kinds)
            plot.fill_between([0, len(history)], level, level + size, color=SHADES[name], lw=0)
            level += size
        alive = level + np.array([*(moment.alive for moment in history), history[-1].alive])
        plot.fill_between(x, level, alive, step="post", color=ACCENT, lw=0)
        peak = int(alive.argmax())
        plot.plot([0, peak], [alive[peak]] * 2, color=INK, lw=0.8, ls=(0, (2, 2)))
        plot.set(xlim=(0, len(history)), ylim=(0, top_bytes), xticks=[])
        plot.spines[["top", "right"]].set_visible(False)
        plot.set_yticks([0, level, alive[peak]], ["0", in_bytes(level), in_bytes(alive[peak])])

    return HIGH, paint


def _moves(history: Sequence[Moment]) -> Block:
    """Draw a row per stage, filled where the step is in it."""
    stages = [stage for stage in dict.fromkeys(moment.stage for moment in history) if stage != "update"]
    scale = (WIDTH - LABELS - MARGIN) / len(history)

    def paint(axes: Axes, top: float) -> None:
        for row, stage in enumerate(stages):
            y = top + 12 + PITCH * row
            put(axes, LABELS - 6, y, stage, "right", color=MUTED)
            box(axes, LABELS, y + 5, WIDTH - LABELS - MARGIN, 1, mix(MUTED, CARD, 0.8))
            for start, end in _runs([moment.stage == stage for moment in history]):
                box(axes, LABELS + start * scale, y + 1, max((end - start) * scale, 1.0), 9, INK)
        put(axes, (LABELS + WIDTH - MARGIN) / 2, top + 14 + PITCH * len(stages), "operators", "center", color=MUTED)

    return 18 + PITCH * len(stages) + ROW, paint


def _runs(inside: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the half-open runs of True."""
    edges = np.flatnonzero(np.diff([0, *map(int, inside), 0]))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
