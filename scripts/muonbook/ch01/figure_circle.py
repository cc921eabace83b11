"""What a 2 x 2 matrix does to the circle of all inputs of length 1, and what its polar factor does to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon

from muonbook.figures.style import ACCENT, INK, MARGIN, MUTED, PADDING, ROW, WIDTH, heading, mix, page, put

PANELS = (("inputs", "v{0}"), ("after M", "s{0}u{0}"), ("after U Vᵀ", "u{0}"))  # what the arrows are called
ROOM = (WIDTH - 2 * MARGIN) / 3  # across, of a panel
LIGHT = mix(PADDING, "#FFFFFF", 0.55)


def draw_circle(matrix: Sequence[Sequence[float]], title: str = "", note: str = "") -> Figure:
    """Draw the unit circle, its image under M and its image under the polar factor U V^T, at one scale.

    matrix: 2 x 2. An arrow shows where each of the two singular directions of the inputs goes.
    Raises ValueError for another shape and for a matrix without two positive singular values.
    """
    u, s, vt = _decompose(matrix)
    images = (np.eye(2), u @ np.diag(s) @ vt, u @ vt)
    unit = (ROOM / 2 - 20) / max(1.0, float(s[0]))  # points; 20 for the letters at the arrows' heads
    height = 2 * unit * max(1.0, *(float(np.abs(_outline(image)[1]).max()) for image in images)) + 2 * ROW + 34

    def paint(axes: Axes, top: float) -> None:
        for n, ((name, letters), image) in enumerate(zip(PANELS, images, strict=True)):
            centre = (MARGIN + (n + 0.5) * ROOM, top + ROW + 12 + (height - 2 * ROW - 20) / 2)
            put(axes, centre[0], top, name, "center", bold=True)
            lengths = (1.0, 1.0) if n != 1 else tuple(map(float, s))
            put(axes, centre[0], top + height - ROW, f"{lengths[0]:.2f} and {lengths[1]:.2f} long", "center")
            _panel(axes, centre, unit, image, vt, letters)

    return page([*heading(title, ""), (height + 2, paint), *heading("", note)])


def describe_circle(matrix: Sequence[Sequence[float]], title: str = "") -> str:
    """Return alt text for `draw_circle`, computed from the matrix. Raises ValueError as it does."""
    u, s, vt = _decompose(matrix)
    rotation = u @ vt
    turn = np.degrees(np.arctan2(rotation[1, 0], rotation[0, 0]))
    kind = f"turned by {turn:.0f} degrees" if np.linalg.det(rotation) > 0 else "mirrored"
    return (
        f"{title or 'A matrix and its polar factor'}. Three panels: a circle of inputs of length 1; its image under M, "
        f"an ellipse with half-axes {s[0]:.2f} and {s[1]:.2f}; its image under the polar factor, the same circle, "
        f"{kind}."
    )


def _decompose(matrix: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m = np.asarray(matrix, dtype=float)
    if m.shape != (2, 2):
        raise ValueError(f"the matrix has shape {m.shape}; a circle can be drawn for 2 x 2.")
    u, s, vt = np.linalg.svd(m)
    if s[1] < 1e-9 * s[0] or s[0] == 0:
        raise ValueError(f"the singular values are {s[0]:g} and {s[1]:g}; without two there is no unique polar factor.")
    signs = np.where(vt[:, 0] + 1e-9 * vt[:, 1] < 0, -1.0, 1.0)  # the same arrows on every machine: pointing right
    return u * signs, s, vt * signs[:, None]


def _outline(image: np.ndarray) -> np.ndarray:
    angle = np.linspace(0, 2 * np.pi, 181)
    return image @ np.array([np.cos(angle), np.sin(angle)])


def _panel(
    axes: Axes, centre: tuple[float, float], unit: float, image: np.ndarray, vt: np.ndarray, letters: str
) -> None:
    """Paint one image of the circle, with the circle itself behind it; y points up."""
    x0, y0 = centre

    def at(points: np.ndarray) -> np.ndarray:
        return np.stack([x0 + unit * points[0], y0 - unit * points[1]], axis=-1)

    axes.add_patch(Polygon(at(_outline(image)), closed=True, fc=LIGHT, ec=INK, lw=1.4))
    axes.add_patch(Polygon(at(_outline(np.eye(2))), closed=True, fc="none", ec=MUTED, lw=0.9, ls=(0, (2, 2))))
    for n, colour in enumerate((INK, ACCENT)):
        head = image @ vt[n]
        (x, y), (lx, ly) = at(head[:, None])[0], at((head * (1 + 10 / (unit * np.linalg.norm(head))))[:, None])[0]
        axes.add_patch(FancyArrowPatch((x0, y0), (x, y), arrowstyle="-|>", mutation_scale=9, color=colour, lw=1.8,
                                       shrinkA=0, shrinkB=0))  # fmt: skip
        put(axes, lx, ly - 6, letters.format("₁₂"[n]), "left" if lx > x + 6 else "center", color=colour)
