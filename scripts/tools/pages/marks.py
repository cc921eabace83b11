"""The signs of the book's notation as a picture: for each, what the four ranks of a 2 x 2 grid hold."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.style import MARGIN, MUTED, ROW, TP_HATCHES, WIDTH, Block, box, card, dp_colour, hatch_on, put

LABEL, SQUARE, LOW = 112.0, 34.0, 12.0  # room for the signs, the side of a matrix, the height of a flat bucket
COLUMN = (WIDTH - 2 * MARGIN - LABEL) / 4
GRID = tuple((dp, tp) for dp in range(2) for tp in range(2))


class Mark(NamedTuple):
    """A sign, what it says, how it is cut ("tp_rows", "tp_columns", "dp"), and whether it is a part of a sum."""

    sign: str
    says: str
    cut: str = ""
    summand: bool = False


MARKS = (
    Mark("W[I, J]", "whole on every rank"),
    Mark("W[I_tp, J]", "rows are cut over TP", "tp_rows"),
    Mark("W[I, J_tp]", "columns are cut over TP", "tp_columns"),
    Mark("B[N_dp]", "a flat bucket, cut over DP", "dp"),
    Mark("G[I_tp, J]{U_dp}", "each a summand: not yet reduced over DP", "tp_rows", True),
)


def draw_marks() -> Figure:
    """Draw what each sign means, one row per sign, one column per rank."""
    return card("The marks say who holds what", "Four ranks: D = 2, T = 2.", _heads(), *map(_row, MARKS))


def describe_marks() -> str:
    """Return alt text for `draw_marks`."""
    return (
        "Four ranks, two DP times two TP, and what they hold. " + "; ".join(f"{m.sign}: {m.says}" for m in MARKS) + "."
    )


def _heads() -> Block:
    def paint(axes: Axes, top: float) -> None:
        for column, (dp, tp) in enumerate(GRID):
            left = MARGIN + LABEL + column * COLUMN
            put(axes, left, top + 4, f"dp {dp}", color=MUTED)
            put(axes, left, top + 4 + ROW, f"tp {tp}", color=MUTED)

    return 2 * ROW + 6, paint


def _row(mark: Mark) -> Block:
    flat = mark.cut == "dp"
    high = LOW if flat else SQUARE

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + high / 2 + 1, mark.sign, bold=True, family="DejaVu Sans Mono")
        put(axes, MARGIN, top + high + 11, mark.says, color=MUTED)
        for column, (dp, tp) in enumerate(GRID):
            left, y = MARGIN + LABEL + column * COLUMN, top + 6
            x, down, wide, tall = 0.0, 0.0, SQUARE, high
            if mark.cut == "tp_rows":
                down, tall = tp * SQUARE / 2, SQUARE / 2
            elif mark.cut == "tp_columns":
                x, wide = tp * SQUARE / 2, SQUARE / 2
            elif flat:
                x, wide = dp * SQUARE / 2, SQUARE / 2
            colour = dp_colour(dp)
            box(axes, left + x, y + down, wide, tall, colour, hatch=TP_HATCHES[tp], ec=hatch_on(colour))
            box(axes, left, y, SQUARE, high, "none", ec=MUTED, lw=0.6)
            if mark.summand:  # on a plate of its own, for type on hatches is hard to read
                box(axes, left + x + wide / 2 - 6, y + down + 2.5, 12, 12, colour)
                put(axes, left + x + wide / 2, y + down + 1.5, "+", "center", bold=True)

    return high + 11 + ROW + 6, paint
