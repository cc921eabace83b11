"""Steps on the scales, two at a time and on one scale: what each keeps, and what comes and goes above that.

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

from muonbook.figures.style import box, in_bytes, mix, page, put, text_block, wide, wrapped  # isort: skip

Step = tuple[ModelStates, Sequence[Moment]]  # bytes kept per kind, and the step's history beyond them
WORK = {  # what is done -> its stages, its colour
    "forward, backward": (PASSES, mix(MUTED, CARD, 0.45)),
    "reduce-scatter": (("reduce_scatter",), COLD),
    "momentum": (("momentum", "dp_gather", "tp_gather"), mix(ACCENT, CARD, 0.55)),
    "Newton–Schulz": (("newton_schulz",), ACCENT),
    "all else": ((), INK),
}
KEPT = mix(MUTED, CARD, 0.78)
STAGES = {  # how captions call them, where not as the code does
    "forward": "the forward pass",
    "backward": "the backward pass",
    "reduce_scatter": "the reduce-scatter",
    "dp_gather": "the DP gather",
    "tp_gather": "the TP gather",
    "newton_schulz": "Newton–Schulz",
}
UNITS = {"B": 1e0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
LEFT = MARGIN + 46.0  # where plots begin, right of the numbers along the scale
ACROSS, HIGH = WIDTH - MARGIN - LEFT, 168.0  # a plot, from the bottom up to the fullest of all
GAP, ASIDE = 3.0, 6.0  # between a line of type and what it stands on, or beside
PLOT = HIGH + 2 * GAP + TITLE  # with room for a number on the fullest
BELOW = ROW + 8.0  # a plot: for the names of its parts
DASHES = (0, (4, 2))
COLUMNS = {True: 76, False: 210}  # into which the passes and the update are divided; each shows its highest moment
ONE = ACROSS / sum(COLUMNS.values())
UPDATE = ONE * COLUMNS[True]  # where it begins, from the left of a plot


def frames_of_steps(steps: Mapping[str, Step], sentences: Mapping[str, str] | None = None) -> list[Frame]:
    """Return a frame of the first step alone, then one for each other step: that step below the first one.

    steps: name -> (bytes kept per kind, the step's history beyond them), the one that others are compared with first.
    sentences: name -> what the caption adds. Raises ValueError for fewer than two steps, for one without an update, and
    for a sentence about none of them.
    """
    if len(steps) < 2 or not all(_parts(history)[False] for _, history in steps.values()):
        raise ValueError("pictures of memory compare steps: two or more, each with a history of its update.")
    if strangers := [name for name in sentences or {} if name not in steps]:
        raise ValueError(f"there is a sentence about {strangers[0]!r}, but the steps are {', '.join(steps)}.")
    first, *others = (_Plot(name, sum(kept.values()), _columns(history)) for name, (kept, history) in steps.items())
    scale = _Scale([first, *others])
    pairs = [([first], _others(others, scale))]
    pairs += [([first, other], _panel(other, first, scale, [_number(other, first, scale)])) for other in others]
    head = max(text_block(_title(pair), TITLE)[0] for pair, _ in pairs)
    return [_frame(pair, scale, lower, head, (sentences or {}).get(pair[-1].name, "")) for pair, lower in pairs]


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


class _Scale:
    """Bytes upwards on a plot, from somewhat below the least that is kept to the fullest of all."""

    def __init__(self, plots: Sequence[_Plot]) -> None:
        least, self.high = min(plot.kept for plot in plots), max(plot.fullest for plot in plots)
        self.low = max(0.0, least - 0.12 * (self.high - least))

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


class _TypeOnPlot(NamedTuple):
    """A line of type on a plot: its left end and its foot, in points from the plot's lower left corner."""

    text: str
    x: float
    up: float
    colour: str = INK
    size: float = SMALL
    bold: bool = False


def _frame(pair: Sequence[_Plot], scale: _Scale, lower: Block, head: float, sentence: str) -> Frame:
    """Return the first step and what is below it. head: the room for the title."""
    title, first, shown = _title(pair), pair[0], pair[-1]
    upper = _panel(first, first, scale, _names(first, scale))
    key = part_key({name: (colour, "") for name, (_, colour) in WORK.items()})
    held = "; ".join(
        f"{plot.name} keeps {in_bytes(plot.kept)}, fullest {in_bytes(plot.fullest)}, in {plot.where}" for plot in pair
    )
    caption = f"Fullest in {shown.where}: {in_bytes(shown.fullest)}{_share_beyond(shown, first)}. {sentence}".rstrip()
    return Frame(page([(head + GAP, text_block(title, TITLE)[1]), upper, lower, *key]), f"{title}. {held}.", caption)


def _title(pair: Sequence[_Plot]) -> str:
    """Return the message: how full the first step is, or how much fuller than that the other one."""
    first, shown = pair[0], pair[-1]
    if shown is first:
        return f"{first.name}: {in_bytes(first.fullest)} at its fullest"
    signed = _beyond(shown, first)
    side = {"+": "above", "−": "below"}.get(signed[0])
    return f"{shown.name}: {f'{signed[1:]} {side}' if side else 'as full as'} {_short(first)}"


def _short(plot: _Plot) -> str:
    return plot.name.split(",")[0]


def _beyond(plot: _Plot, first: _Plot) -> str:
    """Return how much fuller a step is than the first, in the unit of the first: "+9.7 MB"."""
    size, unit = plot.fullest - first.fullest, in_bytes(first.fullest).split()[1]
    amount = f"{abs(size) / UNITS[unit]:.1f} {unit}"
    return amount if amount.startswith("0.0 ") else f"{'+' if size > 0 else '−'}{amount}"


# ---- Panels -----------------------------------------------------------------------------------------------


def _panel(plot: _Plot, first: _Plot, scale: _Scale, labels: Sequence[_TypeOnPlot]) -> Block:
    """Return a step's name, its plot with dashes where the first is fullest, and labels on it; the first's is lower."""
    high = PLOT if plot is not first else max(label.up + label.size for label in labels) + GAP

    def paint(axes: Axes, top: float) -> None:
        floor = top + ROW + high
        put(axes, MARGIN, top, plot.name, bold=True)
        for size in scale.ticks():
            if (up := scale.up(size)) <= high:
                put(axes, LEFT - 6, floor - up - 6, in_bytes(size), "right", color=MUTED)
                box(axes, LEFT - 3, floor - up - 0.4, 3, 0.8, INK)
        _silhouette(axes, floor, plot, scale)
        y, gid = floor - scale.up(first.fullest), f"level-{plot.name}"
        axes.hlines([y], LEFT, LEFT + ACROSS, COLD, linestyles=DASHES, lw=1.3, gid=gid)
        for text, x, up, colour, size, bold in labels:
            put(axes, LEFT + x, floor - up - size, text, bold=bold, color=colour, size=size)
        put(axes, LEFT, floor + GAP, "passes", color=MUTED)
        put(axes, LEFT + UPDATE + ASIDE, floor + GAP, "update", color=MUTED)

    return ROW + high + BELOW, paint


def _silhouette(axes: Axes, floor: float, plot: _Plot, scale: _Scale) -> None:
    """Paint what a step keeps, all that has come and gone above it, and where its update begins."""
    kept, at = scale.up(plot.kept), 0
    box(axes, LEFT, floor - kept, ACROSS, kept, KEPT, gid=f"kept-{plot.name}")
    colours = {stage: colour for stages, colour in WORK.values() for stage in stages}
    for (alive, colour), run in groupby((column.alive, colours.get(column.stage, INK)) for column in plot.columns):
        length = len(list(run))
        if alive:  # a hair wider, or the card would shine through
            x, high = LEFT + at * ONE, scale.long(alive)
            box(axes, x, floor - kept - high, length * ONE + 0.2, high, colour, gid=f"alive-{plot.name}")
        at += length
    axes.vlines([LEFT + UPDATE], floor - kept, floor + ROW, INK, linestyles=(0, (1, 2)), lw=1)


def _names(first: _Plot, scale: _Scale) -> list[_TypeOnPlot]:
    """Return the names of the shapes in the first step's plot, and of the dashes."""
    level = scale.up(first.fullest)
    passes, update, dashes = "activations", "the update", f"{_short(first)}'s fullest: "
    dashes += in_bytes(first.fullest)
    begin, above = ACROSS - wide(update, bold=False), level + GAP
    return [
        _TypeOnPlot("kept from step to step", UPDATE + ASIDE, (scale.up(first.kept) - SMALL) / 2),
        _TypeOnPlot(passes, ASIDE, _foot(first, scale, ASIDE, ASIDE + wide(passes, bold=False), level, above)),
        _TypeOnPlot(update, begin, _foot(first, scale, begin, ACROSS, level, above + ROW)),
        _TypeOnPlot(dashes, ACROSS - wide(dashes), above, COLD, bold=True),
    ]


def _number(plot: _Plot, first: _Plot, scale: _Scale) -> _TypeOnPlot:
    """Return the label at a step's highest point: how much fuller it is than the first."""
    text, level = _beyond(plot, first), scale.up(first.fullest)
    long, middle = wide(text, TITLE), ONE * (plot.columns.index(plot.highest) + 0.5)
    x = min(max(middle - long / 2, ASIDE), ACROSS - long)
    foot = _foot(plot, scale, x, x + long, level, level + GAP, TITLE)
    return _TypeOnPlot(text, x, foot, ACCENT if plot.fullest > first.fullest else INK, TITLE, True)


def _foot(
    plot: _Plot, scale: _Scale, begin: float, end: float, level: float, lifted: float, size: float = SMALL
) -> float:
    """Return where a line of type stands on the columns from begin to end; `lifted` if it would cross the dashes."""
    under = plot.columns[int(begin / ONE) : math.ceil(end / ONE)]
    foot = scale.up(plot.kept + max(column.alive for column in under)) + GAP
    return lifted if foot - GAP <= level < foot + size else foot


def _share_beyond(plot: _Plot, first: _Plot) -> str:
    """Return how much fuller a step is than the first, as the end of a sentence: ", 26 % more than AdamW"."""
    share = round(100 * (plot.fullest / first.fullest - 1))
    return f", {abs(share)} % {'more' if share > 0 else 'less'} than {_short(first)}" if share else ""


def _others(others: Sequence[_Plot], scale: _Scale) -> Block:
    """Return what stands where the next frames have a second plot: who comes there, and how to read it."""
    told = {
        f"Next, one by one, on the same scale: {'; '.join(other.name for other in others)}.": INK,
        f"Upwards: what is held at one time. The scale begins at {in_bytes(scale.low)}.": MUTED,
        "To the right: operators in order, not time.": MUTED,
    }

    def paint(axes: Axes, top: float) -> None:
        for text, colour in told.items():
            for row in wrapped(text, WIDTH - 2 * MARGIN, TEXT):
                put(axes, MARGIN, top, row, color=colour, size=TEXT)
                top += 1.4 * TEXT
            top += 2 * ASIDE

    return ROW + PLOT + BELOW, paint


# ---- Columns ----------------------------------------------------------------------------------------------


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
