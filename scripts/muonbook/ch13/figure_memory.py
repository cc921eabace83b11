"""Steps as silhouettes, two at a time and on one scale: what each keeps, and what comes and goes above that.

The scale begins below what the leanest keeps, not at 0, so that differences show; and of a step's width most is the
update's. To the right runs the number of operators, not time. The first step stands above every other one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from matplotlib.axes import Axes

from distmuon.verify.memory_tracker import Moment
from distmuon.verify.model_states import ModelStates
from muonbook.ch13.step_memory import PASSES
from muonbook.figures.player import Frame
from muonbook.figures.plots import part_key
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, MUTED, ROW, SMALL, TEXT, TITLE, WIDTH, Block

from muonbook.figures.style import box, in_bytes, mix, page, put, text_block, wrapped  # isort: skip

Step = tuple[ModelStates, Sequence[Moment]]  # bytes kept per kind, and the step's history beyond them
WORK = {  # what is done -> its stages, its colour
    "forward, backward": (PASSES, mix(MUTED, CARD, 0.45)),
    "momentum": (("momentum", "dp_gather", "tp_gather"), mix(ACCENT, CARD, 0.55)),
    "Newton–Schulz": (("newton_schulz",), ACCENT),
    "all else": ((), INK),
}
KEPT = mix(MUTED, CARD, 0.78)
STAGES = {  # how captions call them, where not as the code does
    "forward": "the forward pass",
    "backward": "the backward pass",
    "dp_gather": "the DP gather",
    "tp_gather": "the TP gather",
    "newton_schulz": "Newton–Schulz",
}
LEFT = MARGIN + 46.0  # where plots begin, right of the numbers along the scale
ACROSS, HIGH, GAP = WIDTH - MARGIN - LEFT, 168.0, 3.0  # a plot, from the bottom up to the fullest of all; below type
PLOT, BELOW = HIGH + 2 * GAP + TITLE, ROW + 8.0  # with room for a number on the fullest; for the names of its parts
COLUMNS = {True: 76, False: 210}  # into which the passes and the update are divided; each shows its highest moment
ONE = ACROSS / sum(COLUMNS.values())
UPDATE = LEFT + ONE * COLUMNS[True]  # where it begins


class Column(NamedTuple):
    """Neighbouring operators at their fullest moment. alive: bytes beyond what is kept. stage: of that moment."""

    alive: int
    stage: str


class _Plot(NamedTuple):
    """One step: bytes kept, and what is alive beyond them in the columns of the passes and of the update."""

    name: str
    kept: int
    columns: list[Column]

    @property
    def highest(self) -> Column:
        """The column in which most is alive."""
        return max(self.columns, key=lambda column: column.alive)

    @property
    def fullest(self) -> int:
        """The most bytes that it holds at one time."""
        return self.kept + self.highest.alive

    @property
    def where(self) -> str:
        """In words, during which stage it is fullest."""
        return STAGES.get(self.highest.stage, self.highest.stage)

    @property
    def short(self) -> str:
        return self.name.partition(",")[0]


class _Scale:
    """Bytes upwards on a plot, from somewhat below the least that is kept to the fullest of all."""

    def __init__(self, plots: Sequence[_Plot]) -> None:
        least, self.high = min(plot.kept for plot in plots), max(plot.fullest for plot in plots)
        self.low = max(0.0, least - 0.12 * (self.high - least))

    def up(self, size: float) -> float:
        """Return how far above the bottom of the plot a number of bytes is, in points."""
        return HIGH * (size - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return three to seven round numbers."""
        unit = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = next(unit * f for f in (0.2, 0.5, 1.0, 2.0) if (self.high - self.low) / (unit * f) <= 7)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def frames_of_steps(steps: Mapping[str, Step], sentences: Mapping[str, str]) -> list[Frame]:
    """Return a frame of the first step alone, then one for each other step: that step below the first one.

    steps: name -> (bytes kept per kind, the step's history beyond them), the one that others are compared with first.
    sentences: name -> what the caption adds.
    """
    plots = [_Plot(name, sum(kept.values()), _columns(history)) for name, (kept, history) in steps.items()]
    first, scale = plots[0], _Scale(plots)
    room = max(text_block(_title(plot, first), TITLE)[0] for plot in plots)
    key = part_key({name: (colour, "") for name, (_, colour) in WORK.items()})
    frames = []
    for plot in plots:
        title = _title(plot, first)
        lower = _how_to_read(plots, scale) if plot is first else _panel(plot, first, scale)
        pair = [first] if plot is first else [first, plot]
        held = "; ".join(
            f"{one.name} keeps {in_bytes(one.kept)}, fullest {in_bytes(one.fullest)}, in {one.where}" for one in pair
        )
        share = round(100 * (plot.fullest / first.fullest - 1))
        than = f", {abs(share)} % {'more' if share > 0 else 'less'} than {first.short}" if share else ""
        caption = f"Fullest in {plot.where}: {in_bytes(plot.fullest)}{than}. {sentences.get(plot.name, '')}".rstrip()
        blocks = [(room + GAP, text_block(title, TITLE)[1]), _panel(first, first, scale), lower, *key]
        frames.append(Frame(page(blocks), f"{title}. {held}.", caption))
    return frames


def _title(plot: _Plot, first: _Plot) -> str:
    """Return the message: how full the first step is, or how much fuller than that the other one."""
    if plot is first:
        return f"{plot.name}: {in_bytes(plot.fullest)} at its fullest"
    signed = _beyond(plot, first)
    return f"{plot.name}: {signed[1:]} {'above' if signed[0] == '+' else 'below'} {first.short}"


def _beyond(plot: _Plot, first: _Plot) -> str:
    """Return how much fuller a step is than the first: "+9.7 MB"."""
    more = plot.fullest - first.fullest
    return f"{'+' if more > 0 else '−'}{abs(more) / 1e6:.1f} MB"


def _columns(history: Sequence[Moment]) -> list[Column]:
    """Return the fullest moment of each column, from left to right: the passes', then the update's."""
    shown = []
    for passes, count in COLUMNS.items():
        moments = [moment for moment in history if (moment.stage in PASSES) == passes]
        for n in range(count):
            begin = n * len(moments) // count
            end = max((n + 1) * len(moments) // count, begin + 1)
            highest = max(moments[begin:end], key=lambda m: m.alive, default=Moment("forward", 0))
            shown.append(Column(highest.alive, highest.stage))
    return shown


# ---- Panels -----------------------------------------------------------------------------------------------


def _panel(plot: _Plot, first: _Plot, scale: _Scale) -> Block:
    """Return a step's name, and its plot with dashes where the first is fullest; the first's is as high as it needs."""
    high = PLOT if plot is not first else scale.up(first.fullest) + 2 * GAP + SMALL

    def paint(axes: Axes, top: float) -> None:
        floor = top + ROW + high
        put(axes, MARGIN, top, plot.name, bold=True)
        for size in (size for size in scale.ticks() if scale.up(size) < high):
            put(axes, LEFT - 6, floor - scale.up(size) - 6, in_bytes(size), "right", color=MUTED)
            box(axes, LEFT - 3, floor - scale.up(size) - 0.4, 3, 0.8, INK)
        _silhouette(axes, floor, plot, scale)
        level, fullest = floor - scale.up(first.fullest), floor - scale.up(max(plot.fullest, first.fullest))
        axes.hlines([level], LEFT, LEFT + ACROSS, COLD, linestyles=(0, (4, 2)), lw=1.3, gid=f"level-{plot.name}")
        if plot is first:
            words = f"fullest: {in_bytes(first.fullest)}"
            put(axes, LEFT + ACROSS, fullest - GAP - SMALL, words, "right", bold=True, color=COLD)
            put(axes, UPDATE + 6, floor - (scale.up(first.kept) + SMALL) / 2, "kept from step to step")
        else:
            colour = ACCENT if plot.fullest > first.fullest else INK
            words = _beyond(plot, first)
            put(axes, LEFT + ACROSS, fullest - GAP - TITLE, words, "right", bold=True, color=colour, size=TITLE)
        put(axes, LEFT, floor + GAP, "passes", color=MUTED)
        put(axes, UPDATE + 6, floor + GAP, "update", color=MUTED)

    return ROW + high + BELOW, paint


def _silhouette(axes: Axes, floor: float, plot: _Plot, scale: _Scale) -> None:
    """Paint what a step keeps, all that has come and gone above it, and where its update begins."""
    kept, at = scale.up(plot.kept), 0
    box(axes, LEFT, floor - kept, ACROSS, kept, KEPT, gid=f"kept-{plot.name}")
    colours = {stage: colour for stages, colour in WORK.values() for stage in stages}
    for (alive, colour), run in groupby((column.alive, colours.get(column.stage, INK)) for column in plot.columns):
        length = len(list(run))
        if alive:  # a hair wider, or the card would shine through
            top = scale.up(plot.kept + alive)
            box(axes, LEFT + at * ONE, floor - top, length * ONE + 0.2, top - kept, colour, gid=f"alive-{plot.name}")
        at += length
    axes.vlines([UPDATE], floor - kept, floor + ROW, INK, linestyles=(0, (1, 2)), lw=1)


def _how_to_read(plots: Sequence[_Plot], scale: _Scale) -> Block:
    """Return what stands where the next frames have a second plot: who comes there, and how to read it."""
    told = {
        f"Next, one by one, on the same scale: {'; '.join(plot.name for plot in plots[1:])}.": INK,
        f"Upwards: what is held at one time. The scale begins at {in_bytes(scale.low)}.": MUTED,
        "To the right: operators in order, not time.": MUTED,
    }

    def paint(axes: Axes, top: float) -> None:
        for text, colour in told.items():
            for row in wrapped(text, WIDTH - 2 * MARGIN, TEXT):
                put(axes, MARGIN, top, row, color=colour, size=TEXT)
                top += 1.4 * TEXT
            top += 12

    return ROW + PLOT + BELOW, paint
