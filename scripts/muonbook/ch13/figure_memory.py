"""One step's memory, a contender each: what it keeps, and what comes and goes above that, on one scale.

As frames, and side by side. The scale begins below what the leanest keeps, not at 0, so that differences show; and of a
step's width most is the update's. To the right runs the number of operators, not time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
    card,
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
SMALL_ACROSS, SMALL_HIGH, GAP = (WIDTH - 2 * MARGIN - 16.0) / 2, 92.0, 16.0  # of a plot that has a neighbour
DASHES = (0, (4, 2))
COLUMNS = {True: 60, False: 225}  # into which the passes and the update are divided; each shows its highest moment


def frames_of_steps(steps: Mapping[str, Step]) -> list[Frame]:
    """Return a frame for each step, in order; the first is the one that the others are compared with.

    steps: name -> (bytes kept per kind, the step's history beyond them). Raises ValueError for fewer than two steps, or
    one without an update.
    """
    kept, peaks, scale = _compared(steps, HIGH)
    return [_frame(steps[name][1], name, kept, peaks, scale) for name in steps]


def draw_steps(steps: Mapping[str, Step], title: str = "") -> Figure:
    """Draw the steps of `frames_of_steps` side by side, two in a row, on one scale. Errors as there."""
    kept, peaks, scale = _compared(steps, SMALL_HIGH)
    first, names = next(iter(steps)), list(steps)
    pitch = 2 * ROW + SMALL_HIGH + GAP

    def paint(axes: Axes, top: float) -> None:
        for n, name in enumerate(names):
            left, y = MARGIN + n % 2 * (SMALL_ACROSS + 16), top + n // 2 * pitch
            put(axes, left, y + 6, name, bold=True)
            put(axes, left, y + 6 + ROW, f"fullest {in_bytes(peaks[name])}", color=MUTED)
            floor = y + 2 * ROW + 6 + SMALL_HIGH
            _towers(axes, left, floor, SMALL_ACROSS, steps[name][1], kept[name], scale)
            _dashes(axes, left, floor, SMALL_ACROSS, {peaks[first], kept[first]}, scale)

    rows = (len(names) + 1) // 2
    return card(title, "", (pitch * rows, paint), _key(first.split(",")[0]))


def describe_steps(steps: Mapping[str, Step], title: str = "") -> str:
    """Return alt text for `draw_steps`: what every step keeps, and holds at its fullest, and where that is."""
    kept, peaks, _ = _compared(steps, SMALL_HIGH)
    told = [f"{name}: kept {in_bytes(kept[name])}, fullest {in_bytes(peaks[name])}, in {_worst(steps[name][1])}"
            for name in steps]  # fmt: skip
    return f"{title}. {'; '.join(told)}."


class _Scale:
    """Bytes from `low` to `high`, upwards on a plot of `height` points."""

    def __init__(self, low: float, high: float, height: float) -> None:
        self.low, self.high, self.height = max(0.0, low), high, height

    def long(self, size: float) -> float:
        """Return how long a number of bytes is, in points."""
        return self.height * size / (self.high - self.low)

    def up(self, size: float) -> float:
        """Return how far above the bottom of the plot a number of bytes is, in points."""
        return self.long(size - self.low)

    def ticks(self) -> list[float]:
        """Return three to seven round numbers."""
        unit = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = next(unit * f for f in (0.2, 0.5, 1.0, 2.0) if (self.high - self.low) / (unit * f) <= 7)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _compared(steps: Mapping[str, Step], height: float) -> tuple[dict[str, int], dict[str, int], _Scale]:
    """Return what every step keeps, what it holds at its fullest, and the scale on which all of them have room."""
    if len(steps) < 2 or not all(_parts(history)[False] for _, history in steps.values()):
        raise ValueError("pictures of memory compare steps: two or more, each with a history of its update.")
    kept = {name: sum(states.values()) for name, (states, _) in steps.items()}
    peaks = {name: kept[name] + max(m.alive for m in history) for name, (_, history) in steps.items()}
    room = max(peaks.values()) - min(kept.values())
    return kept, peaks, _Scale(min(kept.values()) - 0.12 * room, max(peaks.values()) + 0.05 * room, height)


def _worst(history: Sequence[Moment]) -> str:
    """Return in words during which stage most is alive."""
    stage = max(history, key=lambda moment: moment.alive).stage
    return STAGES.get(stage, stage)


def _frame(
    history: Sequence[Moment], name: str, kept: Mapping[str, int], peaks: Mapping[str, int], scale: _Scale
) -> Frame:
    first = next(iter(kept))
    told = f"{name} keeps {in_bytes(kept[name])}"
    if name != first:
        told += f", {_than(kept[name] - kept[first], first)}"
    told += f". At its fullest, in {_worst(history)}, it holds {in_bytes(peaks[name])}"
    if name != first:
        told += f", {_than(peaks[name] - peaks[first], first)}"

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top, name, bold=True, size=TEXT)
        put(axes, WIDTH - MARGIN, top + 1, f"fullest {in_bytes(peaks[name])}", "right", color=INK)
        floor, left = top + ABOVE + HIGH, MARGIN + LABELS
        for size in scale.ticks():
            put(axes, left - 6, floor - scale.up(size) - 6, in_bytes(size), "right", color=MUTED)
            box(axes, left - 3, floor - scale.up(size) - 0.4, 3, 0.8, INK)
        divide = _towers(axes, left, floor, ACROSS, history, kept[name], scale)
        put(axes, divide + 6, floor - min(scale.up(kept[name]), 18), f"kept: {in_bytes(kept[name])}", color=INK)
        _dashes(axes, left, floor, ACROSS, {peaks[first], kept[first]}, scale)
        put(axes, (left + divide) / 2, floor + 6, "passes", "center", color=MUTED)
        put(axes, (divide + WIDTH - MARGIN) / 2, floor + 6, "update, operator by operator", "center", color=MUTED)

    return Frame(page([(ABOVE + HIGH + BELOW, paint), _key(first.split(",")[0])]), f"{told}.", f"{told}.")


def _towers(
    axes: Axes, left: float, floor: float, across: float, history: Sequence[Moment], kept: int, scale: _Scale
) -> float:
    """Paint the ground that a step stands on, and all that comes and goes; return where its update begins."""
    ground = scale.up(kept)
    box(axes, left, floor - ground, across, ground, KEPT)
    for x, width, alive, colour in _columns(history, across):
        box(axes, left + x, floor - ground - (high := scale.long(alive)), width, high, colour)
    divide = left + across * COLUMNS[True] / sum(COLUMNS.values())
    axes.vlines([divide], floor - scale.height, floor + 6, INK, linestyles=(0, (1, 2)), lw=1)
    return divide


def _dashes(axes: Axes, left: float, floor: float, across: float, sizes: Iterable[int], scale: _Scale) -> None:
    for size in sizes:
        axes.hlines([floor - scale.up(size)], left, left + across, COLD, linestyles=DASHES, lw=1.3)


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


def _columns(history: Sequence[Moment], across: float) -> list[tuple[float, float, int, str]]:
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
    found, at, one = [], 0, across / sum(COLUMNS.values())
    for (alive, colour), run in groupby(shown):
        length = len(list(run))
        found.append((at * one, length * one + 0.2, alive, colour))  # a hair wider, or the card would shine through
        at += length
    return [column for column in found if column[2]]
