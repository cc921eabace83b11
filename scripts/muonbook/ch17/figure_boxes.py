"""Rows of one tensor, written in boxes by some ranks and read in other boxes by others."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.style import INK, MARGIN, MUTED, WIDTH

from muonbook.figures.style import box, dp_colour, page, put  # isort: skip

Rows = tuple[int, int]  # begin, end
HIGH, BETWEEN = 26.0, 62.0  # of a strip; from the top of one to the top of the next


def draw_boxes(written: Sequence[Rows], wanted: Sequence[Rows]) -> tuple[Figure, str]:
    """Draw both strips of rows, each row in the colour of the rank that has written it; return it with its alt text.

    written, wanted: each rank's rows, in order; together all rows of the tensor.
    """
    unit = (WIDTH - 2 * MARGIN) / written[-1][1]

    def strip(axes: Axes, top: float, title: str, ranks: Sequence[Rows]) -> None:
        put(axes, MARGIN, top, title, color=MUTED)
        for writer, (begin, end) in enumerate(written):
            box(axes, MARGIN + unit * begin, top + 20, unit * (end - begin), HIGH, dp_colour(writer), ec="none")
        for rank, (begin, end) in enumerate(ranks):
            box(axes, MARGIN + unit * begin, top + 20, unit * (end - begin), HIGH, "none", ec=INK, lw=1.4)
            put(axes, MARGIN + unit * (begin + end) / 2, top + 22 + HIGH, str(rank), "center", color=MUTED)

    def paint(axes: Axes, top: float) -> None:
        strip(axes, top, f"{len(written)} ranks write, a box each; below is their number", written)
        strip(axes, top + BETWEEN + 10, f"{len(wanted)} ranks read what they need of these boxes", wanted)

    opened = [sum(begin < end_w and begin_w < end for begin_w, end_w in written) for begin, end in wanted]
    alt = (
        f"{written[-1][1]} rows of one tensor, written by {len(written)} ranks and read by {len(wanted)}. "
        f"The readers open {', '.join(map(str, opened))} boxes."
    )
    return page([(2 * BETWEEN + 10, paint)]), alt
