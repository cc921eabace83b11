"""What orthogonalizing each block alone does, for two rows on two ranks: arrows, and their singular values.

Two rows of length 1 with an angle between them. Alone, each row is orthogonal as it stands. As a matrix they are turned
apart until they are at right angles. Closed forms, so that every machine draws the same.
"""

from __future__ import annotations

from math import cos, radians, sin, sqrt

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Circle, FancyArrowPatch

from muonbook.figures.player import Frame
from muonbook.figures.style import ACCENT, INK, MARGIN, MUTED, ROW, WIDTH, Block

from muonbook.figures.style import box, card, put  # isort: skip

ANGLES = (5, 10, 20, 30, 45, 60, 75, 90)  # degrees, between the rows
HALF = (WIDTH - 2 * MARGIN) / 2
RADIUS, BAR = 104.0, 80.0  # of length 1, as an arrow and as a bar
Rows = tuple[tuple[float, float], tuple[float, float]]


def rows_at(angle: float) -> Rows:
    """Return two rows of length 1 with this angle between them, to either side of the diagonal."""
    half = radians(angle) / 2
    return (cos(radians(45) + half), sin(radians(45) + half)), (cos(radians(45) - half), sin(radians(45) - half))


def strengths(angle: float) -> tuple[float, float]:
    """Return the singular values of two rows of length 1 with this angle between them."""
    return sqrt(1 + cos(radians(angle))), sqrt(1 - cos(radians(angle)))


def frames_of_blocks() -> list[Frame]:
    """Return the update of two blocks and of the whole, for rows that turn away from each other, to right angles."""
    frames = []
    for angle in ANGLES:
        large, small = strengths(angle)
        line = f"{angle}° between the rows of two ranks: "
        if angle == 90:
            line += "block by block or as a whole, the same update. Here a cut does no harm."
        else:
            line += f"blocks give {large:.2f} and {small:.2f}, the whole 1 and 1."
        if angle == ANGLES[0]:
            line += " What both share comes out at √2, the rest fades."
        alt = f"{line} Arrows of the blocks' update stay {angle}° apart, those of the whole are at right angles."
        frames.append(Frame(_draw(angle), alt, line))
    return frames


def _draw(angle: float) -> Figure:
    def paint(axes: Axes, top: float) -> None:
        for n, (name, colour, apart) in enumerate((("each block alone", INK, angle), ("the whole", ACCENT, 90.0))):
            x = MARGIN + n * (HALF + 8)
            put(axes, x, top, name, bold=True, color=colour)
            _arrows(axes, (x + 12, top + ROW + 12 + RADIUS), rows_at(angle), rows_at(apart), colour)
            y = top + ROW + 30 + RADIUS
            for value in strengths(apart):
                box(axes, x, y, value * BAR, 14, colour, gid="strength")
                put(axes, x + HALF - 12, y, f"{value:.2f}", "right")
                y += 20
            axes.vlines(x + BAR, y - 43, y - 3, INK, lw=1, ls=(0, (2, 2)))
        put(axes, MARGIN, top + ROW + RADIUS + 78, "bars: singular values; dotted: 1, what Muon wants", color=MUTED)

    body: Block = (2 * ROW + RADIUS + 80, paint)
    return card("", "thin: momentum, a row per rank; bold: its update", body)


def _arrows(axes: Axes, origin: tuple[float, float], before: Rows, after: Rows, colour: str) -> None:
    """Draw the rows of the momentum, thin, and of the update, in the quarter of the plane above `origin`."""
    x, y = origin
    axes.add_patch(Arc(origin, 2 * RADIUS, 2 * RADIUS, theta1=270, theta2=360, color=MUTED, lw=0.8, ls=(0, (2, 2))))
    axes.add_patch(Circle(origin, 2.5, fc=INK, lw=0))
    for rows, paint, line, head in ((after, colour, 3.0, 7), (before, MUTED, 1.2, 4)):
        for right, up in rows:
            end = (x + RADIUS * right, y - RADIUS * up)
            style = f"-|>,head_length={head},head_width={0.55 * head}"
            axes.add_patch(FancyArrowPatch(origin, end, arrowstyle=style, color=paint, lw=line, shrinkA=0, shrinkB=0))
