"""What TP costs: where one part of one matrix travels."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from muonbook.figures.player import Frame
from muonbook.figures.plots import head
from muonbook.figures.style import (
    ACCENT,
    CARD,
    COLD,
    INK,
    MARGIN,
    MUTED,
    ROW,
    WIDTH,
    Block,
    box,
    card,
    ink_on,
    mix,
    put,
)

D, T = 4, 8  # of the grid on which one part is followed
ADAMW_BYTES, MOMENTUM_BYTES = 8, 2  # per element: gradient and parameter in float32; momentum in bf16
NAMES, LINE = 48.0, 17.0  # room for a TP rank's name; a rank's height


def frames_of_parts(title: str = "") -> list[Frame]:
    """Return where TP rank 0's part of one matrix goes: with AdamW; with Muon, where one DP rank holds a piece, or two.

    That is all that is sent of this part. Two holders send each other their pieces of it (*gather cut*).
    """
    captions = (
        "AdamW: gradient and parameter, over DP.",
        "Muon: momentum as well, over TP, on the DP rank that holds the matrix.",
        "Two DP ranks hold a piece each: they send it to each other, and both gather over TP.",
    )
    frames, adamw = [], (D - 1) * ADAMW_BYTES
    for holders, caption in enumerate(captions):
        times = holders - 1 + holders * (T - 1) if holders else 0
        muon = times * MOMENTUM_BYTES
        told = [
            f"AdamW: {D - 1} × {ADAMW_BYTES} bytes = {adamw}",
            f"Muon adds {times} × {MOMENTUM_BYTES} bytes = {muon}: {muon / adamw:.2f} more" if holders else "",
        ]
        note = "Bytes per element. Black: TP rank 0's part of one matrix."
        figure = card(title, note, _grid_of_parts(holders), _lines(told))
        alt = f"{head(title, 'One part')} {D} DP × {T} TP ranks. {'. '.join(filter(None, told))}."
        frames.append(Frame(figure, alt, caption))
    return frames


def _grid_of_parts(holders: int) -> Block:
    """Return the grid: a column per DP rank, TP rank 0 on top. holders: DP ranks that gather over TP."""
    across = (WIDTH - 2 * MARGIN - NAMES) / D

    def paint(axes: Axes, top: float) -> None:
        for d in range(D):
            put(axes, MARGIN + NAMES + across * (d + 0.5), top + 6, f"DP {d}", "center", color=MUTED)
        for t in range(T):
            y = top + 8 + ROW + LINE * t
            put(axes, MARGIN, y + 2, f"TP {t}", color=MUTED)
            for d in range(D):
                sent = _sent_to(d, t, holders)
                wide = (across - 2) / len(sent)
                for n, (colour, words) in enumerate(sent):
                    x = MARGIN + NAMES + across * d + 1 + wide * n
                    box(axes, x, y, wide, LINE - 2, colour, gid=f"part-{d}-{t}")
                    if words:
                        put(axes, x + wide / 2, y + 2, words, "center", color=ink_on(colour))

    return 8 + ROW + LINE * T + 4, paint


def _sent_to(d: int, t: int, holders: int) -> list[tuple[str, str]]:
    """Return what a rank is sent per element of the part, AdamW's bytes and momentum: (colour, bytes) of each."""
    momentum = ACCENT, str(MOMENTUM_BYTES)
    if (d, t) == (0, 0):
        return [(INK, "")]
    if t == 0:
        return [(COLD, str(ADAMW_BYTES)), *[momentum] * (d < holders)]
    return [momentum if d < holders else (mix(MUTED, CARD, 0.75), "")]


def _lines(told: Sequence[str]) -> Block:
    def paint(axes: Axes, top: float) -> None:
        for n, (line, colour) in enumerate(zip(told, (COLD, ACCENT), strict=True)):
            put(axes, MARGIN, top + 4 + ROW * n, line, bold=True, color=colour)

    return 8 + ROW * len(told), paint
