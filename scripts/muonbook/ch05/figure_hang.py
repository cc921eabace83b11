"""A hang as a picture: who waits in a collective until the timeout, and who has left. No lengths in it are measured."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.style import ACCENT, CARD, INK, MARGIN, MUTED, WIDTH, Block, box, card, dp_colour, mix, put

LANE, BAR = 34.0, 20.0  # from rank to rank, and of a bar
START, COMES, ENDS = MARGIN + 48, MARGIN + 118, WIDTH - MARGIN - 84  # of the program, of the collective, of the wait


def draw_hang(told: list[str | None]) -> Figure:
    """Draw a lane per rank. told: what each rank said of the collective; None: it left before and said nothing."""

    def paint(axes: Axes, top: float) -> None:
        put(axes, COMES, top, "all_reduce", color=MUTED)
        put(axes, ENDS, top, "timeout", color=MUTED)
        top += 19
        for x in (COMES, ENDS):
            axes.plot([x, x], [top, top + LANE * len(told) - 6], color=mix(MUTED, CARD, 0.4), lw=1, ls=(0, (3, 2)))
        for rank, words in enumerate(told):
            y = top + rank * LANE + 4
            put(axes, MARGIN, y + 3, f"rank {rank}", bold=words is None)
            if words is None:
                box(axes, START, y, COMES - START - 20, BAR, dp_colour(rank), gid="left")
                put(axes, COMES + 8, y + 3, "left, no error", bold=True)
                continue
            box(axes, START, y, COMES - START, BAR, dp_colour(rank))
            faint = mix(dp_colour(rank), CARD, 0.7)
            box(axes, COMES, y, ENDS - COMES, BAR, faint, ec=dp_colour(rank), lw=1, gid="waits")
            put(axes, (COMES + ENDS) / 2, y + 3, "waits", "center", color=INK)
            put(axes, ENDS + 6, y + 3, "complains", color=ACCENT, bold=True)

    drawing: Block = (19 + LANE * len(told), paint)
    return card("Whoever complains was there", "", drawing)


def describe_hang(told: list[str | None]) -> str:
    """Return alt text for `draw_hang`."""
    waited = [str(rank) for rank, words in enumerate(told) if words]
    left = [str(rank) for rank, words in enumerate(told) if not words]
    return (
        f"A lane of time for each of {len(told)} ranks. Ranks {', '.join(waited)} reach an all_reduce, wait in it "
        f"until the timeout, and complain. Rank {', '.join(left)} has left before it, without an error."
    )
