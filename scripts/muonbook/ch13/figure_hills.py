"""Steps of `figure_memory` as silhouettes, AdamW's and Muon's side by side, a frame for every world, on one scale.

Heights above the grounds are to scale. Shapes are not: all that is known here of a hill or a tower is its highest
moment. Grounds are torn off a little below the leanest. AdamW's tower is left out: `hills_and_towers` answers only
where it is the lower of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Polygon

from muonbook.ch13.figure_memory import ASIDE, DASHES, GAP, KEPT, WORK
from muonbook.ch13.memory_tables import HillAndTower
from muonbook.figures.player import Frame
from muonbook.figures.plots import head
from muonbook.figures.style import ACCENT, CARD, COLD, INK, LOOKS, MARGIN, ROW, SMALL, TEXT, TITLE, WIDTH, Block

from muonbook.figures.style import box, card, in_bytes, put, wide  # isort: skip

HILL = WORK["forward, backward"][1]
HIGH = 176.0  # from the leanest ground to the highest peak, in the world where that is most
DEEP, TOOTH = 26.0, 4.0  # how much of the leanest ground is left; a tooth of its torn edge, half as wide, as high
SLIM, BETWEEN, RIGHT = 62.0, 12.0, WIDTH - MARGIN  # a tower, between grounds, where Muon's ground ends
BROAD = (RIGHT - MARGIN - BETWEEN - SLIM - 5 * ASIDE) / 2  # each hill
MUONS = MARGIN + BROAD + 2 * ASIDE + BETWEEN  # where Muon's ground begins
ROOM = 2 * ROW + 24  # how high a hill is that has room for its name over its size
LOW = ROW + 9  # how high a hill is that has room for its size
CAP = 3.5  # half a bar across either end of a measured distance


TOWER = WORK["Newton–Schulz"][1]
BESIDE = BROAD + ASIDE  # from the hill's left end to the tower's
Peaks = Mapping[str, HillAndTower]  # as `hills_and_towers` returns them


def frames_of_hills(worlds: Sequence[tuple[str, Peaks, str]], title: str = "", note: str = "") -> list[Frame]:
    """Return a frame for every world: AdamW's ground and hill beside Muon's ground, hill and tower, all on one scale.

    worlds: name, peaks of its steps, and Muon's layout, a column of `memory_tables.PLANNED`. Raises ValueError for no
    world.
    """
    if not worlds:
        raise ValueError("hills and towers stand in one world or more; here is none.")
    pairs = [_Pair(peaks["AdamW"], peaks[layout]) for _, peaks, layout in worlds]
    point, frames = max(pair.highest - pair.leanest for pair in pairs) / HIGH, []
    for (name, _, layout), pair in zip(worlds, pairs, strict=True):
        peak = pair.muon._fields[pair.muon.index(pair.muon.highest)]
        caption = f"{name}: Muon's peak is its {peak}, {pair.compared} AdamW's."
        figure = card(title, note, _panel(name, pair, layout, point))
        frames.append(Frame(figure, f"{head(title, 'Hills and towers')} {_describe(name, pair, layout)}", caption))
    return frames


def _describe(name: str, pair: _Pair, layout: str) -> str:
    """Return in words what a frame shows: what either keeps, how high hills and tower are, and which is the peak."""
    adamw, muon, amount = pair.adamw, pair.muon, pair.amount
    return (
        f"{name}: AdamW keeps {in_bytes(adamw.hill.ground)}, and its hill of {amount(adamw.hill.height)} "
        f"makes a peak of {in_bytes(adamw.highest.top)}. Muon, {layout}, keeps {pair.kept}; on that stand a hill "
        f"of {amount(muon.hill.height)} and a tower of {amount(muon.tower.height)}, the higher of them "
        f"{pair.compared} AdamW's peak."
    )


class _Pair(NamedTuple):
    """A step with AdamW, and one with Muon, in the same world."""

    adamw: HillAndTower
    muon: HillAndTower

    @property
    def leanest(self) -> float:
        """The least that either keeps, in bytes."""
        return min(peak.ground for step in self for peak in step)

    @property
    def highest(self) -> float:
        """The most that either holds, in bytes."""
        return max(step.highest.top for step in self)

    @property
    def beyond(self) -> float:
        """How much higher Muon's peak is, in bytes; negative where it is lower."""
        return self.muon.highest.top - self.adamw.highest.top

    @property
    def signed(self) -> str:
        """The same in words: "−0.2 GB"; without a sign where they are as high."""
        name, size, _ = self._unit
        amount = f"{abs(self.beyond) / size:.1f}"
        return f"{'' if amount == '0.0' else '+' if self.beyond > 0 else '−'}{amount} {name}"

    @property
    def compared(self) -> str:
        """Where Muon's peak is, in words that "AdamW's" can follow."""
        side = {"+": "above", "−": "below"}.get(self.signed[0])
        return f"{self.signed[1:]} {side}" if side else "as high as"

    @property
    def kept(self) -> str:
        """In words, what Muon keeps less than AdamW."""
        saved = self.adamw.hill.ground - self.muon.hill.ground
        return f"{self.amount(abs(saved))} {'less' if saved >= 0 else 'more'}"

    def amount(self, size: float) -> str:
        """Return a height with this pair's unit."""
        name, unit, digits = self._unit
        return f"{size / unit:.{digits}f} {name}"

    @property
    def _unit(self) -> tuple[str, float, int]:
        """The unit of all its heights: name, bytes, digits after the point."""
        return ("GB", 1e9, 2) if self.highest >= 1e9 else ("MB", 1e6, 1)


def _panel(name: str, pair: _Pair, layout: str, point: float) -> Block:
    """Return the name of a world, AdamW's peak as dashes, and both steps below it. point: bytes."""
    level = (pair.adamw.highest.top - pair.leanest) / point
    above = TEXT + 9 + TITLE + 2 * GAP  # the name, and numbers on the dashes

    def paint(axes: Axes, top: float) -> None:
        floor = top + above + HIGH  # the leanest ground
        put(axes, MARGIN, top + 4, name, bold=True, size=TEXT)
        for who, step, x, end in (("AdamW", pair.adamw, MARGIN, MUONS - BETWEEN), ("Muon", pair.muon, MUONS, RIGHT)):
            grounds = [(peak.ground - pair.leanest) / point for peak in step]
            _ground(axes, f"{name}-{who}", (x, end), floor, grounds)
            size = step.hill.height
            _hill(axes, f"{name}-{who}", x + ASIDE, floor - grounds[0], size / point, pair.amount(size))
            if step is pair.muon and step.tower.height:
                words = ["tower", pair.amount(step.tower.height)]
                _tower(axes, name, x + ASIDE + BESIDE, floor - grounds[1], step.tower.height / point, words)
            kept = pair.kept if step is pair.muon else in_bytes(step.hill.ground)
            put(axes, x + ASIDE, floor + 5, f"ground: {kept}")
            named = f"{who}, {layout}" if step is pair.muon else who
            put(axes, x, floor + DEEP + GAP, named, bold=True, color=LOOKS[who]["color"])
        axes.hlines([floor - level], MARGIN, RIGHT, COLD, linestyles=DASHES, lw=1.3, gid=f"level-{name}")
        line = f"AdamW's peak, {in_bytes(pair.adamw.highest.top)}"
        put(axes, MARGIN, floor - level - GAP - SMALL, line, bold=True, color=COLD)
        _number(axes, pair, floor, level, point)

    return above + HIGH + DEEP + GAP + ROW + 8, paint


def _ground(axes: Axes, name: str, across: tuple[float, float], floor: float, grounds: Sequence[float]) -> None:
    """Paint what a step keeps, with its lower edge torn. grounds: points above the floor, of each peak."""
    (left, right), (hills, towers) = across, grounds
    middle = left + BROAD + 1.5 * ASIDE
    teeth = np.linspace(right, left, 2 * round((right - left) / TOOTH / 2) + 1)
    torn = [(x, floor + DEEP - TOOTH * (n % 2)) for n, x in enumerate(teeth)]
    upper = [(left, floor - hills), (middle, floor - hills), (middle, floor - towers), (right, floor - towers)]
    axes.add_patch(Polygon([*upper, *torn], fc=KEPT, lw=0, gid=f"ground-{name}"))


def _hill(axes: Axes, name: str, x: float, foot: float, high: float, size: str) -> None:
    """Paint a hill with its name and size on it, as far as there is room. x: its left end."""
    along = np.linspace(0.0, 1.0, 61)
    slope = list(zip(x + BROAD * along, foot - high * np.sin(np.pi * along) ** 1.25, strict=True))
    axes.add_patch(Polygon(slope, fc=HILL, lw=0, gid=f"hill-{name}"))
    if high > LOW and wide(size) < BROAD:
        _words(axes, ["hill", size][high < ROOM :], x + BROAD / 2, foot - 6)


def _tower(axes: Axes, name: str, x: float, foot: float, high: float, words: Sequence[str]) -> None:
    """Paint a tower with its name and size: on it, or above it where it is too low for them. x: its left edge."""
    box(axes, x, foot - high, SLIM, high, TOWER, gid=f"tower-{name}")
    inside = high > ROW * len(words)
    _words(axes, words, x + SLIM / 2, foot - (2 if inside else high + GAP), CARD if inside else TOWER)


def _words(axes: Axes, rows: Sequence[str], middle: float, foot: float, colour: str = INK) -> None:
    """Write rows above `foot`, the last of them bold."""
    for n, row in enumerate(reversed(rows)):
        put(axes, middle, foot - SMALL - 14.5 * n, row, "center", bold=not n, color=colour)


def _number(axes: Axes, pair: _Pair, floor: float, level: float, point: float) -> None:
    """Write how much higher Muon's peak is, there: between it and the dashes, or above if that is narrow."""
    middles = (BROAD / 2, BESIDE + SLIM / 2)
    middle = MUONS + ASIDE + middles[pair.muon.index(pair.muon.highest)]
    reached = (pair.muon.highest.top - pair.leanest) / point
    looks: dict[str, Any] = {"bold": True, "size": TITLE, "color": ACCENT if pair.beyond > 0 else INK}
    if level - reached > TITLE + 2 * GAP:
        axes.vlines([middle], floor - level, floor - reached, INK, lw=1.3)
        axes.hlines([floor - level, floor - reached], middle - CAP, middle + CAP, INK, lw=1.3)
        right = middle + 2 * ASIDE + wide(pair.signed, TITLE) < RIGHT
        x, side = (middle + 2 * ASIDE, "left") if right else (middle - 2 * ASIDE, "right")
        put(axes, x, floor - (level + reached) / 2 - TITLE / 2, pair.signed, side, **looks)
        return
    x = min(middle, RIGHT - wide(pair.signed, TITLE) / 2)
    put(axes, x, floor - max(level, reached) - GAP - TITLE, pair.signed, "center", **looks)
