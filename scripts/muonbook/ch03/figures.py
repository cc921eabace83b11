"""One step of Muon as a picture that moves, and three plots of what the worker measured.

The moving picture shows a small matrix after every line. Cells show size and sign; under them stand the singular
values as bars. Where a frame changes a matrix, colours and bars keep the scale of the frame before. A frame around one
cell or around all says what a new cell is made from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from distmuon.extras.metrics.matrix import rms
from distmuon.optim.muon import apply_, decay_, momentum_, orthogonalize, scale
from distmuon.optim.newton_schulz import singular_values
from distmuon.optim.options import MUON_DEFAULTS
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_curves, draw_curves
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, MUTED, PADDING, TEXT, TITLE, WIDTH, Block, box

from muonbook.figures.style import ink_on, mix, page, put, text_block  # isort: skip

ROWS, COLUMNS = 4, 6
FROM_A_CELL, FROM_ALL = "A cell is made from this cell alone.", "Every cell is made from the whole matrix."
LR, MOMENTUM, DECAY = 0.01, 0.95, 0.1  # as in `experiments`
STEPS = 4  # whose gradients are in the momentum
ACROSS, HIGH = (WIDTH - 2 * MARGIN) / COLUMNS, 30.0  # of a cell
NAMES, BAR, PITCH = 54.0, 13.0, 19.0  # room for numbers; thickness of a bar, from one to the next


class Line(NamedTuple):
    """A line of the step: its name, its formula, what it leaves, what a cell is made from, what there is to see.

    alike: the matrices drawn in one scale with this one, itself included. digits: after the point.
    """

    title: str
    formula: str
    matrix: Tensor
    needs: str  # FROM_A_CELL, FROM_ALL or nothing
    caption: str
    alike: tuple[Tensor, ...]
    digits: int = 2


def gradient(step: int) -> Tensor:
    """Return the gradient of one step [ROWS, COLUMNS], in float64: one strong direction, and a batch's noise."""
    strong = torch.outer(torch.tensor([3.0, -2.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, -1.0, 1.0, -2.0, 1.0]))
    rows, columns = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)
    noise = (7 * rows + 5 * columns * columns + 3 * step * (rows + 1) + columns * step) % 7 - 3
    return (strong.double() + 0.4 * noise) / 4


def lines() -> list[Line]:
    """Return the lines of step `STEPS`, each with the matrix that it leaves, computed by the optimizer's functions."""
    rows, columns = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)
    weight = ((5 * rows * rows + 3 * columns + rows * columns) % 7 - 3).double() / 50
    momentum = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for step in range(STEPS):
        newest = gradient(step)
        (fed,) = momentum_([momentum], [newest], MOMENTUM)
    (update,) = orthogonalize([fed.clone()], MUON_DEFAULTS)
    factor = scale(weight.shape)
    scaled, shrunk, moved = factor * update, weight.clone(), weight.clone()
    decay_([shrunk], LR, DECAY)
    moved.copy_(shrunk)
    apply_([moved], [update], LR, factor)
    sums, updates, weights = (momentum, fed), (update, scaled), (weight, shrunk, moved)
    question = "One direction is much stronger than the others. What will the step do?"
    fainter = "Every earlier gradient counts 5 % less than the one after it."
    twice = "The newest gradient counts once more. One direction still dominates."
    same = f"The size of an entry no longer depends on the shape. Here s = {factor:.2f}."
    before = f"The weights before the step. We take η = {LR} and λ = {DECAY}, as for the digits below."
    shrinks = f"All weights shrink by {LR * DECAY:.1%}, which you hardly see.".replace("%", " %")
    done = f"An entry moves by about {LR * rms(scaled):.4f}. Of six lines, only one needs the whole matrix."
    return [
        Line("The gradient", "G", newest, "", question, (newest,)),
        Line("Remember", "M ← 0.95 M + G", momentum, FROM_A_CELL, fainter, sums),
        Line("Look ahead", "U = 0.95 M + G", fed, FROM_A_CELL, twice, sums),
        Line(
            "Orthogonalize",
            "O = NewtonSchulz(U)",
            update,
            FROM_ALL,
            "All directions are about equally strong.",
            updates,
        ),
        Line("Scale", "s O,  s = 0.2 √6", scaled, FROM_A_CELL, same, updates),
        Line("The weights", "W", weight, "", before, weights, 4),
        Line("Decay", "W ← (1 − ηλ) W", shrunk, FROM_A_CELL, shrinks, weights, 4),
        Line("Apply", "W ← W − η s O", moved, FROM_A_CELL, done, weights, 4),
    ]


def frames_of_lines() -> list[Frame]:
    """Return the step as frames, one per line."""
    return [Frame(_draw(line), _describe(line), line.caption) for line in lines()]


def _draw(line: Line) -> Figure:
    return page([text_block(line.title, TITLE), text_block(line.formula, TEXT), _cells(line), _bars(line)])


def _describe(line: Line) -> str:
    values = ", ".join(f"{value:.{line.digits}f}" for value in singular_values(line.matrix).tolist())
    size = f"a matrix of {ROWS} by {COLUMNS} with singular values {values}"
    return " ".join(filter(None, [f"{line.title}: {line.formula}, {size}.", line.needs, line.caption]))


def _cells(line: Line) -> Block:
    largest = max(float(matrix.abs().max()) for matrix in line.alike)

    def paint(axes: Axes, top: float) -> None:
        top += 4
        for row, cells in enumerate(line.matrix.tolist()):
            for column, value in enumerate(cells):
                x, y = MARGIN + column * ACROSS, top + row * HIGH
                colour = mix(CARD, ACCENT if value > 0 else COLD, abs(value) / largest)
                box(axes, x, y, ACROSS, HIGH, colour, ec=PADDING, lw=0.6)
                put(axes, x + ACROSS / 2, y + 8.5, _written(value, line), "center", color=ink_on(colour))
        if line.needs:
            size = (COLUMNS * ACROSS, ROWS * HIGH) if line.needs == FROM_ALL else (ACROSS, HIGH)
            box(axes, MARGIN, top, *size, "none", ec=INK, lw=2.6, gid="needs")
            put(axes, MARGIN, top + ROWS * HIGH + 6, line.needs)

    return 4 + ROWS * HIGH + 30, paint


def _bars(line: Line) -> Block:
    values = singular_values(line.matrix).tolist()
    greatest = max(float(singular_values(matrix)[0]) for matrix in line.alike)

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top, "singular values", color=MUTED)
        longest = WIDTH - 2 * MARGIN - NAMES
        for n, value in enumerate(values):
            y = top + 20 + n * PITCH
            box(axes, MARGIN, y, longest * value / greatest, BAR, MUTED, gid=f"value-{n}")
            put(axes, WIDTH - MARGIN, y, _written(value, line), "right", bold=True)

    return 20 + ROWS * PITCH, paint


def _written(value: float, line: Line) -> str:
    return f"{value:.{line.digits}f}".replace("-", "−")


# ---- Plots of what the worker wrote -----------------------------------------------------------------------


def draw_worker_curves(
    file: str | Path,
    y_label: str,
    title: str,
    name: str = "{}",
    log_y: bool = False,
) -> tuple[Figure, str]:
    """Draw the curves of a worker's --json file over the step. name: how the name of a curve is written."""
    curves = json.loads(Path(file).read_text())
    series = {name.format(key): (range(1, len(values) + 1), values) for key, values in curves.items()}
    figure = draw_curves(series, "step", y_label, title, log_y=log_y)
    return figure, describe_curves(series, "step", y_label, title)
