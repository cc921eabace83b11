"""Peaks of a step beside AdamW's: how far below it, or above, every layout of Muon's is, in several worlds."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from muonbook.ch13.memory_tables import PeakedWorld
from muonbook.figures.plots import head
from muonbook.figures.style import ACCENT, CARD, LOOKS, MARGIN, MUTED, ROW, TEXT, WIDTH, Block

from muonbook.figures.style import box, card, in_bytes, put  # isort: skip

NAMES, AMOUNTS = 106.0, 66.0  # room for what stands to the left of the bars, and to the right
LEFT, RIGHT = MARGIN + NAMES, WIDTH - MARGIN - AMOUNTS
ZERO, HALF = (LEFT + RIGHT) / 2, (RIGHT - LEFT) / 2
BAR, PITCH, HEAD = 12.0, 18.0, 2 * ROW + 14.0  # a bar; from one to the next; a panel's title and its line's name
LINE = 1.6  # bars begin beside it
BREAK, BEFORE_END = 3.5, 9.0  # the gap in a bar that is cut off: how wide and how oblique, how far from the end
BELOW, ABOVE = MUTED, ACCENT


def draw_peaks(worlds: Mapping[str, PeakedWorld], title: str = "", note: str = "", most: float = 0.0) -> Figure:
    """Draw a panel for every world, a bar for every layout: to the left of AdamW's peak, or to the right.

    worlds: title -> what was found there. most: bytes on either side, beyond which bars break off; 0: the longest bar.
    Raises ValueError where there is no bar.
    """
    longest = max((abs(size) for world in worlds.values() for size in world.beyond.values()), default=None)
    if longest is None:
        raise ValueError("peaks are compared in one world or more, by one layout or more; here is none.")
    limit = most or longest or 1.0
    return card(title, note, _sides(), *(_panel(name, world, limit) for name, world in worlds.items()))


def describe_peaks(worlds: Mapping[str, PeakedWorld], title: str = "", **_: str | float) -> str:
    """Return alt text for `draw_peaks`: AdamW's peak in every world, and how far from it every layout's is."""
    told = []
    for name, world in worlds.items():
        bars = ", ".join(f"{layout} {_told(size)}" for layout, size in world.beyond.items())
        told.append(f"{name}, from {_line(world)}: {bars}.")
    return f"{head(title, 'Peaks of a step')} {' '.join(told)}"


def _line(world: PeakedWorld) -> str:
    return f"AdamW's peak, {in_bytes(world.adamw)}"


def _told(size: float) -> str:
    signed = _signed(size)
    return f"{signed[1:]} {'above' if signed[0] == '+' else 'below'}" if signed[0] in "+−" else "as high"


def _signed(size: float) -> str:
    amount = f"{abs(size) / 1e9:.1f} GB"
    return amount if amount == "0.0 GB" else f"{'+' if size > 0 else '−'}{amount}"


def _colour(size: float) -> str:
    return ABOVE if size > 0 else BELOW


def _sides() -> Block:
    def paint(axes: Axes, top: float) -> None:
        put(axes, ZERO - 10, top + 6, "← below AdamW", "right", color=BELOW, weight="bold")
        put(axes, ZERO + 10, top + 6, "above AdamW →", color=ABOVE, weight="bold")

    return ROW + 8, paint


def _panel(name: str, world: PeakedWorld, limit: float) -> Block:
    bottom = HEAD + PITCH * len(world.beyond)

    def paint(axes: Axes, top: float) -> None:
        zero = LOOKS["AdamW"]
        put(axes, MARGIN, top + 4, name, bold=True, size=TEXT)
        put(axes, ZERO, top + 8 + ROW, _line(world), "center", color=zero["color"])
        for row, (layout, size) in enumerate(world.beyond.items()):
            y = top + HEAD + PITCH * row
            put(axes, MARGIN, y, layout)
            _bar(axes, y - 1, f"{name}-{layout}", size, limit)
            put(axes, WIDTH - MARGIN, y, _signed(size), "right", bold=True, color=_colour(size))
        axes.vlines([ZERO], top + HEAD - 5, top + bottom, zero["color"], lw=LINE, linestyles=zero["ls"])

    return bottom + 10, paint


def _bar(axes: Axes, y: float, name: str, size: float, limit: float) -> None:
    """Paint a bar from the line to its side, and the gap in one that would be longer than the limit."""
    toward = 1 if size > 0 else -1
    begin, length = ZERO + toward * LINE / 2, HALF * min(abs(size) / limit, 1.0)
    box(axes, min(begin, begin + toward * length), y, length, BAR, _colour(size), gid=f"peak-{name}")
    if abs(size) > limit:
        x = begin + toward * (length - BEFORE_END)
        corners = [(x - BREAK, y + BAR), (x, y + BAR), (x + BREAK, y), (x, y)]
        axes.add_patch(Polygon(corners, fc=CARD, ec=CARD, lw=0.6, gid=f"break-{name}"))
