"""The whole book as one picture: a stop per chapter, and what has become of the matrix when you get there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Ellipse

from muonbook.figures.style import INK, MARGIN, MUTED, OPTIMIZERS, ROW, TEXT, TITLE, TP_HATCHES, WIDTH, Block

from muonbook.figures.style import box, dp_colour, page, put, text_block, wrapped  # isort: skip

SIDE, WORDS_LEFT = 36.0, 64.0  # of an icon; where words begin

# part -> chapter number -> the question that it answers
STOPS: Mapping[str, Mapping[int, str]] = {
    "At a glance": {0: "How does all of it look in one file?"},
    "One device": {
        1: "Why should a step treat all directions alike?",
        2: "How do matrix products find the polar factor?",
        3: "What else is in a step, and for which matrices?",
        4: "Does it learn better, and how would one know?",
    },
    "Many processes": {
        5: "How do they work together, sharing nothing?",
        6: "Who keeps the optimizer's state?",
        7: "Which rank owns which element?",
        8: "How are pieces made whole for a moment?",
        9: "And if the layer itself is cut?",
        10: "Does it fit together? Is it the same optimizer?",
        11: "How does it break, and which alarm rings?",
    },
    "Measured": {
        12: "What does Muon send, and who else counted it?",
        13: "Who holds how much, and for how long?",
        14: "Where does the time of a step go?",
        15: "On which batch, grid and link does it pay?",
    },
    "Beyond the blueprint": {
        16: "And if nobody had to gather at all?",
        17: "May it come into a program that exists?",
        18: "And what if a machine dies?",
    },
}


def draw_journey(titles: Mapping[int, str]) -> Figure:
    """Draw the path through the book. titles: chapter number -> title; chapters without one are left out."""
    blocks = [text_block("From one matrix to eight processes", TITLE)]
    for part, questions in STOPS.items():
        stops = [_stop(number, titles[number], question) for number, question in questions.items() if number in titles]
        blocks += [text_block(f"\n{part}", TEXT), *stops] * bool(stops)
    return page(blocks)


def describe_journey(titles: Mapping[int, str]) -> str:
    """Return alt text for `draw_journey`."""
    parts = []
    for part, questions in STOPS.items():
        stops = [f"{n}. {titles[n]}: {question}" for n, question in questions.items() if n in titles]
        parts += [f"{part}. " + " ".join(stops)] * bool(stops)
    return "The path through the book, with a question at every stop. " + " ".join(parts)


def _stop(number: int, title: str, question: str) -> Block:
    room = WIDTH - MARGIN - WORDS_LEFT
    names, asked = wrapped(f"{number}. {title}", room, TEXT, bold=True), wrapped(question, room)

    def paint(axes: Axes, top: float) -> None:
        ICONS[number](axes, MARGIN, top + 9)
        for row, line in enumerate(names):
            put(axes, WORDS_LEFT, top + 7 + ROW * row, line, bold=True, size=TEXT)
        for row, line in enumerate(asked):
            put(axes, WORDS_LEFT, top + 10 + ROW * (len(names) + row), line, color=MUTED)

    return max(SIDE, ROW * (len(names) + len(asked))) + 20, paint


# ---- Icons, SIDE wide and high, with their upper left corner at (x, y) ------------------------------------


def _outline(axes: Axes, x: float, y: float, width: float = SIDE, height: float = SIDE) -> None:
    box(axes, x, y, width, height, "none", ec=INK, lw=1.2)


def _file(axes: Axes, x: float, y: float) -> None:
    _outline(axes, x + SIDE * 0.12, y, SIDE * 0.76)
    for row, length in enumerate((0.35, 0.5, 0.25, 0.45)):
        place = (x + SIDE * 0.24, y + SIDE * (0.16 + 0.2 * row))
        box(axes, *place, SIDE * length, SIDE * 0.1, dp_colour(row))


def _skewed(axes: Axes, x: float, y: float) -> None:
    axes.add_patch(Ellipse((x + SIDE / 2, y + SIDE / 2), SIDE, SIDE / 4, angle=-30, fc="none", ec=INK, lw=1.6))


def _round(axes: Axes, x: float, y: float) -> None:
    _skewed(axes, x, y)
    axes.add_patch(Circle((x + SIDE / 2, y + SIDE / 2), SIDE / 2, fc="none", ec=INK, lw=1.6, ls=(0, (4, 2))))


def _step(axes: Axes, x: float, y: float) -> None:
    _outline(axes, x, y, SIDE * 0.6, SIDE * 0.6)
    arrow = {"arrowstyle": "-|>", "lw": 1.6, "color": INK}
    axes.annotate("", (x + SIDE, y + SIDE), (x + SIDE * 0.45, y + SIDE * 0.45), arrowprops=arrow)


def _race(axes: Axes, x: float, y: float) -> None:
    across = [n / 12 for n in range(13)]
    for decay, optimizer in ((2.0, "SGD"), (3.5, "AdamW"), (7.0, "Muon")):
        heights = [0.1 + 0.72 * (1 - math.exp(-decay * t)) for t in across]
        look = {**OPTIMIZERS[optimizer], "lw": 1.8}
        axes.plot([x + SIDE * t for t in across], [y + SIDE * h for h in heights], **look)
    axes.plot([x, x + SIDE], [y + SIDE * 0.95] * 2, color=MUTED, lw=1.4)


def _processes(axes: Axes, x: float, y: float) -> None:
    corners = [(x + SIDE * a, y + SIDE * b) for a, b in ((0.2, 0.2), (0.8, 0.2), (0.8, 0.8), (0.2, 0.8))]
    ring = [*corners, corners[0]]
    axes.plot([a for a, _ in ring], [b for _, b in ring], color=INK, lw=1.2)
    for rank, corner in enumerate(corners):
        axes.add_patch(Circle(corner, SIDE * 0.17, fc=dp_colour(rank), lw=0, zorder=3))


def _strip(axes: Axes, x: float, y: float, high: float, cuts: tuple[float, ...] = (0, 0.25, 0.5, 0.75, 1)) -> None:
    for rank, (start, end) in enumerate(itertools.pairwise(cuts)):
        box(axes, x + start * SIDE, y, (end - start) * SIDE, high, dp_colour(rank))


def _shards(axes: Axes, x: float, y: float) -> None:
    _strip(axes, x, y + SIDE * 0.35, SIDE * 0.3)


def _map(axes: Axes, x: float, y: float) -> None:
    _strip(axes, x, y + SIDE * 0.2, SIDE * 0.24)
    _strip(axes, x, y + SIDE * 0.7, SIDE * 0.24)
    axes.plot([x, x, x + SIDE * 0.6, x + SIDE * 0.6], [y + SIDE * d for d in (0.14, 0.06, 0.06, 0.14)], color=INK, lw=2)


def _bands(axes: Axes, x: float, y: float) -> None:
    for rank, (start, end) in enumerate(((0, 0.3), (0.3, 0.6), (0.6, 0.85), (0.85, 1))):
        box(axes, x, y + start * SIDE, SIDE, (end - start) * SIDE, dp_colour(rank))
    _outline(axes, x, y)


def _halves(axes: Axes, x: float, y: float) -> None:
    for rank in range(2):
        box(axes, x + rank * SIDE / 2, y, SIDE / 2, SIDE, dp_colour(1), hatch=TP_HATCHES[rank], ec=INK)
    _outline(axes, x, y)


def _grid(axes: Axes, x: float, y: float, broken: int | None = None) -> None:
    for rank in range(8):
        dp, tp = divmod(rank, 2)
        place = (x + SIDE * (0.12 + 0.42 * tp), y + SIDE * 0.26 * dp)
        box(axes, *place, SIDE * 0.36, SIDE * 0.22, dp_colour(dp), hatch=TP_HATCHES[tp], ec=INK)
        if rank == broken:
            a, b = place[0] + SIDE * 0.18, place[1] + SIDE * 0.11
            axes.plot([a - 9, a + 9], [b - 9, b + 9], color=INK, lw=2.4)
            axes.plot([a - 9, a + 9], [b + 9, b - 9], color=INK, lw=2.4)


def _broken(axes: Axes, x: float, y: float) -> None:
    _grid(axes, x, y, broken=5)


def _weighed(axes: Axes, x: float, y: float) -> None:
    for column, high in enumerate((0.18, 0.24)):
        for rank in range(4):
            place = (x + SIDE * (0.1 + 0.46 * column), y + SIDE * (1 - high * (rank + 1)))
            box(axes, *place, SIDE * 0.34, SIDE * high, dp_colour(rank))
    axes.plot([x, x + SIDE], [y + SIDE, y + SIDE], color=INK, lw=1.6)


def _peak(axes: Axes, x: float, y: float) -> None:
    heights = (0.35, 0.35, 0.9, 0.55, 0.95, 0.35, 0.35)
    across = [x + SIDE * i / (len(heights) - 1) for i in range(len(heights))]
    axes.fill_between(across, y + SIDE, [y + SIDE * (1 - h) for h in heights], color=dp_colour(1), lw=0)
    axes.plot([x, x + SIDE], [y + SIDE * 0.65] * 2, color=INK, lw=1.4, ls=(0, (3, 2)))
    axes.plot([x, x + SIDE], [y + SIDE] * 2, color=INK, lw=1.6)


def _timeline(axes: Axes, x: float, y: float) -> None:
    for rank, spans in enumerate((((0, 0.45), (0.6, 1)), ((0.1, 0.3), (0.4, 0.85)), ((0, 0.25), (0.5, 0.95)))):
        for start, end in spans:
            place = (x + SIDE * start, y + SIDE * (0.06 + 0.34 * rank))
            box(axes, *place, SIDE * (end - start), SIDE * 0.22, dp_colour(rank))


def _crossing(axes: Axes, x: float, y: float) -> None:
    axes.plot([x, x, x + SIDE], [y, y + SIDE, y + SIDE], color=INK, lw=1.4)
    lines = {"Muon": (0.25, 0.7), "AdamW": (0.85, 0.1)}
    for optimizer, (start, end) in lines.items():
        axes.plot([x + SIDE * 0.08, x + SIDE], [y + SIDE * start, y + SIDE * end], **OPTIMIZERS[optimizer])


def _owned(axes: Axes, x: float, y: float) -> None:
    for rank, (left, high) in enumerate(((0, 0), (0.52, 0), (0, 0.52), (0.52, 0.52))):
        box(axes, x + SIDE * left, y + SIDE * high, SIDE * 0.46, SIDE * 0.46, dp_colour(rank), ec=INK, lw=1.2)


def _gathered(axes: Axes, x: float, y: float) -> None:
    box(axes, x, y, SIDE * 0.42, SIDE, "none", ec=INK, lw=1.2)
    box(axes, x, y + SIDE * 0.25, SIDE * 0.42, SIDE * 0.25, dp_colour(1))
    for rank in range(4):
        box(axes, x + SIDE * 0.58, y + SIDE * 0.25 * rank, SIDE * 0.42, SIDE * 0.25, dp_colour(rank))
    box(axes, x + SIDE * 0.58, y, SIDE * 0.42, SIDE, "none", ec=INK, lw=1.2)


def _machines(axes: Axes, x: float, y: float) -> None:
    for machine in range(2):
        top = y + SIDE * 0.54 * machine
        for rank in range(4):
            colour = "none" if machine and rank > 1 else dp_colour(machine)
            box(
                axes,
                x + SIDE * 0.25 * rank,
                top,
                SIDE * 0.21,
                SIDE * 0.46,
                colour,
                ec=INK if colour != "none" else MUTED,
            )
    a, b = x + SIDE * 0.74, y + SIDE * 0.77
    axes.plot([a - 6, a + 6], [b - 6, b + 6], color=INK, lw=2.4)
    axes.plot([a - 6, a + 6], [b + 6, b - 6], color=INK, lw=2.4)


DRAWN = (_file, _skewed, _round, _step, _race, _processes, _shards, _map, _bands, _halves, _grid, _broken)
MEASURED = (_weighed, _peak, _timeline, _crossing)
BEYOND = (_owned, _gathered, _machines)
ICONS: Mapping[int, Callable[[Axes, float, float], None]] = dict(enumerate(DRAWN + MEASURED + BEYOND))
