"""The picture beside a link to the book: eight ranks hold pieces of a matrix, then all of it, and then pieces again."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.nine_moves import CutMatrix, paint_matrix, small_layer_layout
from muonbook.figures.style import BANNER, MUTED, TEXT, arrow, banner, put

EDGE, BELOW = 20.0, 112.0  # points: around everything; where the drawing begins
NAME, NAME_SIZE, TOP = "Muon at Scale", 27.0, 18.0
LINES = (
    "One optimizer, eight processes, tested code:",
    "how Muon meets sharded training, and what it costs.",
)
PANEL, WHOLE, GAP = 34.0, 156.0, 4.0  # points: as wide as a rank's panel and the whole matrix are; between panels
MOMENTS = ("momentum", "tp_gather", "apply")  # before, in and after the middle of a step


def draw_card() -> Figure:
    """Draw the card: title, two lines, and what eight ranks hold of the smallest matrix on its way through a step."""
    matrix = _matrix()
    rows, columns = matrix.whole

    def paint(axes: Axes) -> None:
        put(axes, EDGE, TOP, NAME, bold=True, size=NAME_SIZE)
        for row, line in enumerate(LINES):
            put(axes, EDGE, TOP + 44 + 19 * row, line, color=MUTED, size=TEXT)
        across = matrix.tp * (PANEL + GAP) - GAP
        right, middle = BANNER[0] - EDGE - across, (BANNER[0] - WHOLE) / 2
        for x, moment in ((EDGE, MOMENTS[0]), (right, MOMENTS[2])):
            _ranks(axes, x, matrix, moment)
        whole = matrix.held(MOMENTS[1], matrix.owners[0], 0)
        paint_matrix(axes, middle, BELOW, matrix, whole, WHOLE / columns)
        level, away = BELOW + WHOLE * rows / columns / 2, 5
        arrow(axes, (EDGE + across + away, level), (middle - away, level), head=(5, 3))
        arrow(axes, (middle + WHOLE + away, level), (right - away, level), head=(5, 3))

    return banner(paint)


def describe_card() -> str:
    """Return alt text for `draw_card`."""
    matrix = _matrix()
    owners = len(matrix.owners) * matrix.tp
    return (
        f"{NAME}. {' '.join(LINES)} Below, one matrix in a step: {owners} processes hold a piece of it each, then all "
        "of it, and then a piece each again."
    )


def _matrix() -> CutMatrix:
    return CutMatrix.find(small_layer_layout(), "weight", tp=2)


def _ranks(axes: Axes, x: float, matrix: CutMatrix, moment: str) -> None:
    """Paint the panels of all ranks, a row per DP rank and a column per TP rank."""
    scale = PANEL / matrix.whole[1]
    for r in range(matrix.layout.dp):
        for t in range(matrix.tp):
            place = x + t * (PANEL + GAP), BELOW + r * (PANEL / 2 + GAP)
            paint_matrix(axes, *place, matrix, matrix.held(moment, r, t), scale)
