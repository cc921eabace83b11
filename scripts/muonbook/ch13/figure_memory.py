"""Training steps on the scales, side by side and on one scale: what each keeps, and what comes and goes above that.

The scale begins below what the leanest keeps, not at 0, so that differences show; and of a step's width most is the
update's. To the right runs the number of operators, not time. The first frame shows the passes, the last whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from matplotlib.axes import Axes

from distmuon.verify.model_states import ModelStates
from distmuon.verify.storage_tracker import Moment
from muonbook.figures.player import Frame
from muonbook.figures.style import (
    ACCENT,
    CARD,
    COLD,
    INK,
    MARGIN,
    MUTED,
    ROW,
    WIDTH,
    box,
    in_bytes,
    mix,
    page,
    put,
)

Step = tuple[ModelStates, Sequence[Moment]]  # bytes kept per kind, and the step's history beyond them
PASSES = ("forward", "backward")
WORK = {  # what is done -> its stages, its colour
    "forward, backward": (PASSES, mix(MUTED, CARD, 0.45)),
    "reduce-scatter": (("reduce_scatter",), COLD),
    "momentum": (("momentum", "dp_gather", "tp_gather"), mix(ACCENT, CARD, 0.55)),
    "Newton–Schulz": (("newton_schulz",), ACCENT),
    "all else": ((), INK),
}
KEPT = mix(MUTED, CARD, 0.78)
STAGES = {  # how captions call them, where not as the code does
    "backward": "the backward pass",
    "reduce_scatter": "the reduce-scatter",
    "dp_gather": "the DP gather",
    "tp_gather": "the TP gather",
    "newton_schulz": "Newton–Schulz",
}
LABELS, HIGH, PITCH = 46.0, 92.0, 138.0  # room for the scale; of a plot; from one row of plots to the next
BETWEEN = 14.0  # two plots
ACROSS = (WIDTH - 2 * MARGIN - LABELS - BETWEEN) / 2
DASHES = (0, (4, 2))
COLUMNS = {True: 32, False: 106}  # into which the passes and the update are divided; each shows its highest moment
DONE = {
    0.0: "The passes alone",
    0.25: "A quarter of the update's operators",
    0.75: "Three quarters",
    1.0: "The whole update",
}


def frames_of_steps(steps: Mapping[str, Step]) -> list[Frame]:
    """Return frames of all steps, from the passes on, until the update is done.

    steps: name -> (bytes kept per kind, the step's history beyond them), the one that others are compared with first.
    Raises ValueError for fewer than two steps, or one without an update.
    """
    if len(steps) < 2 or not all(_parts(history)[False] for _, history in steps.values()):
        raise ValueError("pictures of memory compare steps: two or more, each with a history of its update.")
    plots = {name: _Plot(sum(states.values()), _columns(history)) for name, (states, history) in steps.items()}
    room = max(plot.fullest() for plot in plots.values()) - (least := min(plot.kept for plot in plots.values()))
    scale = _Scale(least - 0.12 * room, least + 1.05 * room)
    return [_frame(plots, scale, done) for done in DONE]


class Column(NamedTuple):
    """Neighbouring operators at their fullest moment. alive: bytes beyond what is kept. stage: of that moment."""

    alive: int
    stage: str


class _Plot(NamedTuple):
    """One step: bytes kept, and what is alive beyond them in the columns of the passes and of the update."""

    kept: int
    columns: list[Column]

    def until(self, done: float) -> list[Column]:
        """Return the columns of the passes, and of the update this share."""
        return self.columns[: COLUMNS[True] + round(done * COLUMNS[False])]

    def fullest(self, done: float = 1.0) -> int:
        """Return the most bytes that it has held by then."""
        return self.kept + max(column.alive for column in self.until(done))


class _Scale:
    """Bytes from `low` to `high`, upwards on a plot."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = max(0.0, low), high

    def long(self, size: float) -> float:
        """Return how long a number of bytes is, in points."""
        return HIGH * size / (self.high - self.low)

    def up(self, size: float) -> float:
        """Return how far above the bottom of the plot a number of bytes is, in points."""
        return self.long(size - self.low)

    def ticks(self) -> list[float]:
        """Return three to seven round numbers."""
        unit = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = next(unit * f for f in (0.2, 0.5, 1.0, 2.0) if (self.high - self.low) / (unit * f) <= 7)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _frame(plots: Mapping[str, _Plot], scale: _Scale, share: float) -> Frame:
    """Return the steps up to a share of their updates."""
    first = next(iter(plots))
    lines = {plots[first].kept, plots[first].fullest()}

    def paint(axes: Axes, top: float) -> None:
        for n, (name, plot) in enumerate(plots.items()):
            left, y = MARGIN + LABELS + n % 2 * (ACROSS + BETWEEN), top + n // 2 * PITCH
            put(axes, left, y, name, bold=True)
            put(axes, left, y + ROW, f"fullest {in_bytes(plot.fullest(share))}", color=MUTED)
            floor = y + 2 * ROW + HIGH
            if n % 2 == 0:
                _numbers(axes, left, floor, scale)
            _towers(axes, left, floor, plot, share, scale)
            for size in lines:
                axes.hlines([floor - scale.up(size)], left, left + ACROSS, COLD, linestyles=DASHES, lw=1.3)
            if n >= len(plots) - 2:
                put(axes, left, floor + 4, "passes", color=MUTED)
                put(axes, left + ACROSS, floor + 4, "update", "right", color=MUTED)

    rows = (len(plots) + 1) // 2
    blocks = [(PITCH * (rows - 1) + 3 * ROW + HIGH + 10, paint), _key(first.split(",")[0])]
    return Frame(page(blocks), *_told(plots, share))


def _told(plots: Mapping[str, _Plot], share: float) -> tuple[str, str]:
    """Return a frame's alt text and its caption: how far it is, and who held more by then than the first ever does."""
    first = next(iter(plots))
    above = [name for name, plot in plots.items() if plot.fullest(share) > plots[first].fullest()]
    caption = f"{DONE[share]}. Above the peak of {first}: {', '.join(above) or 'nobody'}."
    held = "; ".join(
        f"{name} keeps {in_bytes(plot.kept)}, fullest {in_bytes(plot.fullest(share))}, in {_where(plot, share)}"
        for name, plot in plots.items()
    )
    return f"{caption} {held}.", caption


def _where(plot: _Plot, share: float) -> str:
    """Return in words during which stage most was alive."""
    stage = max(plot.until(share), key=lambda column: column.alive).stage
    return STAGES.get(stage, stage)


def _numbers(axes: Axes, left: float, floor: float, scale: _Scale) -> None:
    for size in scale.ticks():
        put(axes, left - 6, floor - scale.up(size) - 6, in_bytes(size), "right", color=MUTED)
        box(axes, left - 3, floor - scale.up(size) - 0.4, 3, 0.8, INK)


def _towers(axes: Axes, left: float, floor: float, plot: _Plot, share: float, scale: _Scale) -> None:
    """Paint the ground that a step stands on, all that has come and gone on it, and where its update begins."""
    ground, one, at = scale.up(plot.kept), ACROSS / sum(COLUMNS.values()), 0
    box(axes, left, floor - ground, ACROSS, ground, KEPT)
    colours = {stage: colour for stages, colour in WORK.values() for stage in stages}
    looks = ((column.alive, colours.get(column.stage, INK)) for column in plot.until(share))
    for (alive, colour), run in groupby(looks):
        length = len(list(run))
        if alive:  # a hair wider, or the card would shine through
            box(axes, left + at * one, floor - ground - (high := scale.long(alive)), length * one + 0.2, high, colour)
        at += length
    divide = left + one * COLUMNS[True]
    axes.vlines([divide], floor - HIGH, floor + 6, INK, linestyles=(0, (1, 2)), lw=1)


def _key(first: str) -> tuple[float, Callable[[Axes, float], None]]:
    """Return the block that says what the colours are, and whose the dashed lines."""

    def paint(axes: Axes, top: float) -> None:
        for n, name in enumerate([*WORK, first]):
            x, y = MARGIN + (0, 136, 252)[n % 3], top + 2 + ROW * (n // 3)
            if name in WORK:
                box(axes, x, y + 2, 10, 10, WORK[name][1])
            else:
                axes.hlines([y + 7], x - 2, x + 11, COLD, linestyles=DASHES, lw=1.3)
            put(axes, x + 14, y, name)

    return 2 * ROW + 4, paint


def _parts(history: Sequence[Moment]) -> dict[bool, list[Moment]]:
    """Return the moments of the passes (True) and those of the update."""
    return {passes: [m for m in history if (m.stage in PASSES) == passes] for passes in (True, False)}


def _columns(history: Sequence[Moment]) -> list[Column]:
    """Return the fullest moment of each column, from left to right: the passes', then the update's."""
    shown = []
    for passes, moments in _parts(history).items():
        count = COLUMNS[passes]
        for n in range(count):
            begin = n * len(moments) // count
            end = max((n + 1) * len(moments) // count, begin + 1)
            highest = max(moments[begin:end], key=lambda m: m.alive, default=Moment("forward", 0))
            shown.append(Column(highest.alive, highest.stage))
    return shown
