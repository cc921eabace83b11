"""Four exhibits of the tour on a card: right and wrong next to each other, a pair of small drawings for each.

What a drawing shows is computed by the real code on a tiny tensor wherever it has numbers in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from distmuon.optim.newton_schulz import newton_schulz, singular_values
from muonbook.figures.healthy import HEALTHY, is_healthy
from muonbook.figures.style import ACCENT, INK, MARGIN, MUTED, PADDING, ROW, WIDTH, Block

from muonbook.figures.style import box, card, dp_colour, mix, put  # isort: skip

GAP, HEIGHT = 10.0, 44.0  # between right and wrong; of a thumbnail
LIGHT = mix(PADDING, "#FFFFFF", 0.5)


@dataclass(frozen=True)
class Thumbnail:
    """A rectangle of the card to draw in, with coordinates from 0 to 1, y downwards."""

    axes: Axes
    x: float
    y: float
    width: float
    height: float
    wrong: bool

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.x + x * self.width, self.y + y * self.height

    def box(self, x: float, y: float, width: float, height: float, colour: str = LIGHT) -> None:
        box(self.axes, *self.at(x, y), width * self.width, height * self.height, colour, ec=INK, lw=0.8)

    def matrix(self, rows: int, columns: int, colours: Sequence[str]) -> None:
        """Draw a matrix of square cells in the middle, as large as fits. colours: of its cells, in rows."""
        side = min(0.95 * self.width / columns, 0.9 * self.height / rows)
        left, top = self.x + (self.width - columns * side) / 2, self.y + (self.height - rows * side) / 2
        for n, colour in enumerate(colours):
            place = (left + n % columns * side, top + n // columns * side)
            box(self.axes, *place, side, side, colour, ec=INK, lw=0.6)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str = INK, lw: float = 1.5) -> None:
        self.axes.add_patch(FancyArrowPatch(self.at(*start), self.at(*end), arrowstyle="-|>", mutation_scale=9,
                                            color=colour, lw=lw, shrinkA=0, shrinkB=0))  # fmt: skip

    def say(self, x: float, y: float, text: str) -> None:
        left, top = self.at(x, y)
        put(self.axes, left, top - 7, text, "center", True, color=ACCENT)

    def bars(self, values: Sequence[float], top: float) -> None:
        """Draw singular values, and the band that healthy ones keep to."""
        low, high = (1 - value / top for value in HEALTHY)
        left, above = self.at(0, high)
        box(self.axes, left, above, self.width, (low - high) * self.height, PADDING, alpha=0.6)
        for n, value in enumerate(values):
            tall, colour = value / top, MUTED if is_healthy(value) else ACCENT
            self.box((n + 0.15) / len(values), 1 - tall, 0.7 / len(values), tall, colour)


class Label(NamedTuple):
    """What is right, what is wrong, and how both are drawn."""

    right: str
    wrong: str
    paint: Callable[[Thumbnail], None]


# ---- One function per exhibit -----------------------------------------------------------------------------


def _stale_loop(thumb: Thumbnail) -> None:
    """Two groups of parameters, and the steps that each takes."""
    for group, steps in enumerate((0, 2) if thumb.wrong else (1, 1)):
        y = 0.12 + 0.46 * group
        thumb.box(0.02, y, 0.2, 0.32)
        for step in range(steps):
            thumb.arrow((0.26 + 0.36 * step, y + 0.16), (0.6 + 0.36 * step, y + 0.16))
        if not steps:
            thumb.say(0.62, y + 0.16, "stays")


def _blocks(thumb: Thumbnail) -> None:
    thumb.bars(spectrum_of("blocks" if thumb.wrong else "whole"), 1.55)


def _owned_piece(thumb: Thumbnail) -> None:
    """A matrix that begins in the shard of DP rank 0 and ends in that of rank 1."""
    thumb.matrix(4, 5, [dp_colour(0)] * 9 + ["#FFFFFF" if thumb.wrong else dp_colour(1)] * 11)


def _gradient(thumb: Thumbnail) -> None:
    """Three gradients, and the direction that is gathered: their decaying sum, or the last one alone."""
    gradients = np.array([[0.5, -0.3], [0.55, 0.1], [0.3, 0.38]])
    momentum = (gradients * 0.95 ** np.arange(2, -1, -1)[:, None]).sum(axis=0)
    chosen = gradients[-1] if thumb.wrong else momentum / np.linalg.norm(momentum) * 0.8
    for x, y in gradients:
        thumb.arrow((0.1, 0.5), (0.1 + x, 0.5 + y), PADDING)
    thumb.arrow((0.1, 0.5), (0.1 + chosen[0], 0.5 + chosen[1]), ACCENT if thumb.wrong else INK, 2.4)


@cache
def spectrum_of(what: str) -> list[float]:
    """Return six singular values of an 8 x 8 matrix, orthogonalized "whole" or in two "blocks"."""
    matrix = torch.from_numpy(np.random.default_rng(2).standard_normal((8, 8)))
    blocks = matrix.chunk({"whole": 1, "blocks": 2}[what])
    values = singular_values(torch.cat([newton_schulz(block, compute_dtype=torch.float64) for block in blocks]))
    return [float(values[n]) for n in (0, 1, 3, 4, 6, 7)]


LABELS = {
    "stale group parameters": Label(
        "Two groups, a step each.", "The first never moves, the second twice.", _stale_loop
    ),
    "block-wise Newton–Schulz": Label(
        "The whole: singular values near 1.", "Two halves, stacked: too long, and lost.", _blocks
    ),
    "owned piece only": Label("All of the matrix.", "This rank's piece, zeros for the rest.", _owned_piece),
    "gradient, not momentum": Label("The sum of what came before.", "The last gradient alone.", _gradient),
}


# ---- The card ---------------------------------------------------------------------------------------------


def draw_museum(title: str) -> Figure:
    """Draw the exhibits, two in a row."""
    names = tuple(LABELS)
    half = (WIDTH - 2 * MARGIN - 2 * GAP) / 2
    thumb = (half - GAP) / 2

    def heads(axes: Axes, top: float) -> None:
        for column in (0, 1):
            left = MARGIN + column * (half + 2 * GAP)
            put(axes, left + thumb / 2, top + 2, "right", "center", color=MUTED)
            put(axes, left + thumb * 1.5 + GAP, top + 2, "wrong", "center", color=ACCENT)

    def row(names: Sequence[str]) -> Block:
        def paint(axes: Axes, top: float) -> None:
            for column, name in enumerate(names):
                left = MARGIN + column * (half + 2 * GAP)
                put(axes, left, top + 4, name, bold=True)
                _pair(axes, LABELS[name], left, top + ROW + 6, thumb)

        return HEIGHT + ROW + 16, paint

    return card(title, "", (ROW + 6, heads), *(row(names[n : n + 2]) for n in range(0, len(names), 2)))


def describe_museum(title: str) -> str:
    """Return alt text for `draw_museum`."""
    pairs = " ".join(f"{name}: {label.right} Broken: {label.wrong}" for name, label in LABELS.items())
    return f"{title}. {len(LABELS)} pairs of small drawings, right and wrong next to each other. {pairs}"


def _pair(axes: Axes, label: Label, left: float, top: float, width: float) -> None:
    for wrong in (False, True):
        x = left + wrong * (width + GAP)
        frame = {"ec": ACCENT if wrong else MUTED, "lw": 1.2}
        box(axes, x, top, width, HEIGHT, "#FFFFFF", **frame)
        inner = (x + 0.06 * width, top + 0.08 * HEIGHT, 0.88 * width, 0.84 * HEIGHT)
        label.paint(Thumbnail(axes, *inner, wrong))
