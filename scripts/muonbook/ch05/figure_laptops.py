"""The D x T grid of ranks as laptops, and who talks to whom: a DP group is a column, a TP group is a row.

A laptop's screen has the colour of its DP rank and the hatch of its TP rank, as everywhere.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon

from muonbook.figures.style import CARD, INK, MARGIN, MUTED, SMALL, TP_HATCHES, WIDTH, Block

from muonbook.figures.style import arrow, card, dp_colour, hatch_on, ink_on, mix, put  # isort: skip

WIDEST, SCREEN, BASE, ROOM, TOP, SIDE = 78.0, 44.0, 8.0, 30.0, 24.0, 46.0  # laptops, between them, for their names
GROUPS = (None, "dp", "tp")


def draw_laptops(dp: int, tp: int, groups: str | None = None, of: int | None = None, title: str = "") -> Figure:
    """Draw dp x tp laptops, a row for each DP rank.

    groups: "dp" draws a frame and arrows in every column, "tp" in every row. of: in the groups of this rank alone, in
    both of them where `groups` is None.
    Raises ValueError for other groups, for a rank that is not there, and for a grid that does not fit on a card.
    """
    apart = (WIDTH - 2 * MARGIN - SIDE) / tp
    across = min(WIDEST, apart - ROOM)
    if groups not in GROUPS or (of is not None and not 0 <= of < dp * tp):
        raise ValueError(f"groups={groups!r}, of={of}: groups are 'dp' or 'tp', and ranks go from 0 to {dp * tp - 1}.")
    if across < 60 or dp > 8:  # no room for "rank 10" on a screen, or the card is too high for a phone
        raise ValueError(f"a grid of {dp} x {tp} laptops does not fit on a card.")
    drawn = groups_of(dp, tp, groups, of)
    step = SCREEN + BASE + ROOM

    def paint(axes: Axes, top: float) -> None:
        def middle(rank: int) -> tuple[float, float]:
            return MARGIN + SIDE + (rank % tp + 0.5) * apart, top + TOP + rank // tp * step + (SCREEN + BASE) / 2

        for column in range(tp):
            put(axes, middle(column)[0], top, f"TP {column}", "center", True)
        for row in range(dp):
            put(axes, MARGIN, middle(row * tp)[1] - SMALL / 2 - 1, f"DP {row}", bold=True)
        for name, members in drawn:
            _around(axes, middle(members[0]), middle(members[-1]), across, name)
        for rank in range(dp * tp):
            _laptop(axes, *middle(rank), across, rank, tp)
        for name, members in drawn:
            for one, other in pairwise(members):
                _talk(axes, middle(one), middle(other), across, name)

    drawing: Block = (TOP + dp * step - ROOM + 10, paint)
    return card(title, "", drawing)


def describe_laptops(dp: int, tp: int, groups: str | None = None, of: int | None = None, title: str = "") -> str:
    """Return alt text for `draw_laptops`."""
    head = f"{title}: " if title else ""
    grid = f"{dp * tp} laptops, one per rank, in {dp} rows (DP 0 to {dp - 1}) and {tp} columns (TP 0 to {tp - 1})"
    drawn = [f"{name.upper()} group of ranks {', '.join(map(str, who))}" for name, who in groups_of(dp, tp, groups, of)]
    return f"{head}{grid}" + (f"; arrows and a frame join the {', the '.join(drawn)}." if drawn else ".")


def groups_of(dp: int, tp: int, groups: str | None = None, of: int | None = None) -> list[tuple[str, list[int]]]:
    """Return name and members of each group that `draw_laptops` draws: columns of the grid, then rows."""
    columns = [("dp", list(range(column, dp * tp, tp))) for column in range(tp)]
    rows = [("tp", list(range(row * tp, (row + 1) * tp))) for row in range(dp)]
    wanted = [] if groups is None and of is None else [groups] if groups else ["dp", "tp"]
    return [(name, who) for name, who in (*columns, *rows) if name in wanted and (of is None or of in who)]


def _around(axes: Axes, first: tuple[float, float], last: tuple[float, float], across: float, name: str) -> None:
    """Draw a frame around the laptops from the first to the last."""
    corner = (first[0] - across / 2 - 9, first[1] - (SCREEN + BASE) / 2 - 7)
    size = (last[0] - first[0] + across + 18, last[1] - first[1] + SCREEN + BASE + 14)
    round_ = "round,pad=0,rounding_size=9"
    axes.add_patch(
        FancyBboxPatch(corner, *size, round_, fc=mix(INK, CARD, 0.93), ec=MUTED, lw=1.1, gid=f"{name} group")
    )


def _talk(axes: Axes, one: tuple[float, float], other: tuple[float, float], across: float, name: str) -> None:
    """Draw an arrow with two heads between two neighbours of a group."""
    (x1, y1), (x2, y2) = one, other
    if name == "dp":
        y1, y2 = y1 + (SCREEN + BASE) / 2 + 2, y2 - (SCREEN + BASE) / 2 - 2
    else:
        x1, x2 = x1 + across / 2 + 3, x2 - across / 2 - 3
    arrow(axes, (x1, y1), (x2, y2), both=True, head=(6, 3.2), gid=f"{name} talks")


def _laptop(axes: Axes, x: float, y: float, across: float, rank: int, tp: int) -> None:
    """Draw an open laptop around a point: a lid with a screen, a keyboard in front of it."""
    dp_rank, tp_rank = divmod(rank, tp)
    colour, top = dp_colour(dp_rank), y - (SCREEN + BASE) / 2
    lid = across - 14
    shape = "round,pad=0,rounding_size=4"
    axes.add_patch(FancyBboxPatch((x - lid / 2, top), lid, SCREEN, shape, fc=INK, lw=0))
    hatch = TP_HATCHES[tp_rank % len(TP_HATCHES)]
    looks: dict[str, Any] = {"fc": colour, "ec": hatch_on(colour), "lw": 0, "hatch": hatch}
    inner = "round,pad=0,rounding_size=1.5"
    axes.add_patch(FancyBboxPatch((x - lid / 2 + 4, top + 4), lid - 8, SCREEN - 8, inner, gid=f"rank {rank}", **looks))
    plate = 7.0 * len(f"rank {rank}") + 4
    if hatch:  # type on hatches is hard to read
        axes.add_patch(FancyBboxPatch((x - plate / 2, top + SCREEN / 2 - 8), plate, 16, inner, fc=colour, lw=0))
    put(axes, x, top + SCREEN / 2 - 7, f"rank {rank}", "center", True, color=ink_on(colour))
    low = top + SCREEN
    keys = [(x - lid / 2, low), (x + lid / 2, low), (x + across / 2, low + BASE), (x - across / 2, low + BASE)]
    axes.add_patch(Polygon(keys, fc=mix(INK, CARD, 0.55), lw=0))
    axes.add_patch(Polygon([(x - 9, low + 3), (x + 9, low + 3), (x + 10, low + 6), (x - 10, low + 6)], fc=INK, lw=0))
