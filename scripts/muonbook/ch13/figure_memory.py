"""One step's memory as frames, a contender each: what it keeps, and what comes and goes above that, on one scale.

The scale begins below what the leanest keeps, not at 0, so that differences show; and of a step's width most is the
update's. To the right runs the number of operators, not time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

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
    TEXT,
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
LABELS, HIGH, ABOVE, BELOW = 48.0, 220.0, 26.0, 24.0  # room for the scale; of the plot; for words above and below it
ACROSS = WIDTH - 2 * MARGIN - LABELS
DASHES = (0, (4, 2))
COLUMNS = {True: 60, False: 225}  # into which the passes and the update are divided; each shows its highest moment


def frames_of_steps(steps: Mapping[str, Step]) -> list[Frame]:
    """Return a frame for each step, in order; the first is the one that the others are compared with.

    steps: name -> (bytes kept per kind, the step's history beyond them). Raises ValueError for fewer than two steps, or
    one without an update.
    """
    if len(steps) < 2 or not all(_parts(history)[False] for _, history in steps.values()):
        raise ValueError("pictures of memory compare steps: two or more, each with a history of its update.")
    kept = {name: sum(states.values()) for name, (states, _) in steps.items()}
    peaks = {name: kept[name] + max(m.alive for m in history) for name, (_, history) in steps.items()}
    room = max(peaks.values()) - min(kept.values())
    scale = _Scale(min(kept.values()) - 0.12 * room, max(peaks.values()) + 0.05 * room)
    return [_frame(steps[name][1], name, kept, peaks, scale) for name in steps]


class _Scale:
    """Bytes from `low` to `high`, upwards on the plot."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = max(0.0, low), high

    def up(self, size: float) -> float:
        """Return how far above the bottom of the plot a number of bytes is, in points."""
        return HIGH * (size - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return three to seven round numbers."""
        unit = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = next(unit * f for f in (0.2, 0.5, 1.0, 2.0) if (self.high - self.low) / (unit * f) <= 7)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _frame(
    history: Sequence[Moment], name: str, kept: Mapping[str, int], peaks: Mapping[str, int], scale: _Scale
) -> Frame:
    first = next(iter(kept))
    worst = max(history, key=lambda moment: moment.alive).stage
    told = f"{name} keeps {in_bytes(kept[name])}"
    if name != first:
        told += f", {_than(kept[name] - kept[first], first)}"
    told += f". At its fullest, in {STAGES.get(worst, worst)}, it holds {in_bytes(peaks[name])}"
    if name != first:
        told += f", {_than(peaks[name] - peaks[first], first)}"

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top, name, bold=True, size=TEXT)
        put(axes, WIDTH - MARGIN, top + 1, f"fullest {in_bytes(peaks[name])}", "right", color=INK)
        floor, left = top + ABOVE + HIGH, MARGIN + LABELS
        divide = left + ACROSS * COLUMNS[True] / sum(COLUMNS.values())
        for size in scale.ticks():
            put(axes, left - 6, floor - scale.up(size) - 6, in_bytes(size), "right", color=MUTED)
            box(axes, left - 3, floor - scale.up(size) - 0.4, 3, 0.8, INK)
        ground = scale.up(kept[name])
        box(axes, left, floor - ground, ACROSS, ground, KEPT)
        put(axes, divide + 6, floor - min(ground, 18), f"kept: {in_bytes(kept[name])}", color=INK)
        for x, width, alive, colour in _columns(history):
            box(axes, left + x, floor - ground - (high := alive * HIGH / (scale.high - scale.low)), width, high, colour)
        for size in {peaks[first], kept[first]}:
            axes.hlines([floor - scale.up(size)], left, WIDTH - MARGIN, COLD, linestyles=DASHES, lw=1.3)
        axes.vlines([divide], top + ABOVE, floor + 6, INK, linestyles=(0, (1, 2)), lw=1)
        put(axes, (left + divide) / 2, floor + 6, "passes", "center", color=MUTED)
        put(axes, (divide + WIDTH - MARGIN) / 2, floor + 6, "update, operator by operator", "center", color=MUTED)

    return Frame(page([(ABOVE + HIGH + BELOW, paint), _key(first.split(",")[0])]), f"{told}.", f"{told}.")


def _than(more: int, first: str) -> str:
    return f"{in_bytes(abs(more))} {'more' if more > 0 else 'less'} than {first}"


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


def _columns(history: Sequence[Moment]) -> list[tuple[float, float, int, str]]:
    """Return (x, width, bytes alive, colour) from left to right, in points; neighbours that look alike in one."""
    colours = {stage: colour for stages, colour in WORK.values() for stage in stages}
    shown: list[tuple[int, str]] = []
    for passes, moments in _parts(history).items():
        count = COLUMNS[passes]
        for n in range(count):
            begin = n * len(moments) // count
            end = max((n + 1) * len(moments) // count, begin + 1)
            highest = max(moments[begin:end], key=lambda m: m.alive, default=Moment("forward", 0))
            shown.append((highest.alive, colours.get(highest.stage, INK)))
    found, at, one = [], 0, ACROSS / sum(COLUMNS.values())
    for (alive, colour), run in groupby(shown):
        length = len(list(run))
        found.append((at * one, length * one + 0.2, alive, colour))  # a hair wider, or the card would shine through
        at += length
    return [column for column in found if column[2]]
