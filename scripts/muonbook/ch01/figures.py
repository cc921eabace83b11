"""Chapter 1's pictures: a circle and its image, the spectra of a layer, and two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon

from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_curves, describe_spectra, draw_curves, draw_spectra
from muonbook.figures.style import (
    ACCENT,
    INK,
    MARGIN,
    MUTED,
    PADDING,
    ROW,
    WIDTH,
    heading,
    mix,
    page,
    put,
)  # fmt: skip

CLASSIC = (15 / 8, -10 / 8, 3 / 8)  # the quintic that ends at 1; chapter 2 derives it
HIGHEST = 250.0  # points, of the room for the ellipse
THINNEST = 0.02  # s2 / s1: a thinner ellipse is a line
NEAR = 0.005  # of 1: the iteration has arrived
LIGHT = mix(PADDING, "#FFFFFF", 0.55)
SHOWN = 9  # of the lengths of a step: longer ones only raise the loss

# ---- The circle -------------------------------------------------------------------------------------------


class Scene(NamedTuple):
    """One frame: its title, the image of the circle, what the two arrows are called, what there is to say."""

    title: str
    image: np.ndarray  # [2, 2]
    letters: str
    caption: str


def frames_of_circle(matrix: Sequence[Sequence[float]]) -> list[Frame]:
    """Return a moving picture: the circle of inputs, stretched and turned by M, then rounded to the polar factor.

    matrix: 2 x 2. Arrows show where the two singular directions of the inputs go. Raises ValueError for another shape
    and for a matrix that makes a line of the circle, or nearly one.
    """
    u, s, vt = _decompose(matrix)
    scenes = _scenes(u, s, vt)
    half_width, half_height = (max(float(np.abs(_outline(scene.image)[k]).max()) for scene in scenes) for k in (0, 1))
    unit = min((WIDTH / 2 - MARGIN - 32) / half_width, (HIGHEST / 2 - 22) / half_height)  # room for the letters
    height = 2 * unit * half_height + 44
    return [Frame(_draw(scene, vt, unit, height), _describe(scene, vt), scene.caption) for scene in scenes]


def _decompose(matrix: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m = np.asarray(matrix, dtype=float)
    if m.shape != (2, 2):
        raise ValueError(f"the matrix has shape {m.shape}; a circle can be drawn for 2 x 2.")
    u, s, vt = np.linalg.svd(m)
    if not s[1] >= THINNEST * s[0] > 0:
        raise ValueError(f"the singular values are {s[0]:g} and {s[1]:g}; that ellipse is a line, or nearly one.")
    signs = np.where(vt[:, 0] + 1e-9 * vt[:, 1] < 0, -1.0, 1.0)  # the same arrows on every machine: pointing right
    return u * signs, s, vt * signs[:, None]


def _scenes(u: np.ndarray, s: np.ndarray, vt: np.ndarray) -> list[Scene]:
    """Return the frames: the circle, stretched halfway, stretched, turned, divided by the norm, then each iteration."""

    def stretched(lengths: np.ndarray) -> np.ndarray:
        return vt.T @ np.diag(lengths) @ vt

    def lengths(s: np.ndarray) -> str:
        return f"{s[0]:.2f} and {s[1]:.2f}"

    rotation = u @ vt
    degrees = round(float(np.degrees(np.arctan2(rotation[1, 0], rotation[0, 0]))))
    turned = f"turns it by {degrees} degrees" if np.linalg.det(rotation) > 0 else "mirrors it"
    axes = f"The circle is now an ellipse. Its half-axes are as long as the singular values, {lengths(s)}."
    scenes = [
        Scene(
            "All inputs of length 1",
            np.eye(2),
            "v{0}",
            "These are all inputs of length 1. What does the matrix M do to them?",
        ),
        Scene("M stretches", stretched(np.sqrt(s)), "", "M stretches along v₁ by one factor, along v₂ by another."),
        Scene("M stretches", stretched(s), "", axes),
        Scene(
            "M stretches, then turns",
            rotation @ stretched(s),
            "s{0}u{0}",
            f"Then M {turned}. That is all that it does.",
        ),
    ]
    s = s / np.sqrt((s**2).sum())
    small = f"We divide M by its Frobenius norm, so that it fits into the circle. Now it has {lengths(s)}."
    scenes.append(Scene("M, made smaller", u @ np.diag(s) @ vt, "", small))
    a, b, c = CLASSIC
    count = 0
    while abs(s - 1).max() > NEAR:
        s, count = a * s + b * s**3 + c * s**5, count + 1
        caption = (
            f"After {3 * count} matrix products the half-axes are {lengths(s)}, and their directions are the same."
        )
        scenes.append(Scene(f"Newton–Schulz, iteration {count}", u @ np.diag(s) @ vt, "", caption))
    end = f"At {lengths(s)} we have a circle again. The stretch is gone and the turn is left."
    return [*scenes[:-1], Scene("U Vᵀ, the polar factor", scenes[-1].image, "u{0}", end)]


def _draw(scene: Scene, vt: np.ndarray, unit: float, height: float) -> Figure:
    """Draw one frame: the image of the circle, the circle itself dashed, and the lengths of both arrows."""
    lengths = [float(np.linalg.norm(scene.image @ v)) for v in vt]

    def paint(axes: Axes, top: float) -> None:
        _ellipse(axes, (WIDTH / 2, top + (height - ROW) / 2), unit, scene.image, vt, scene.letters)
        for x, colour, name, length in zip((0.3, 0.7), (INK, ACCENT), ("s₁", "s₂"), lengths, strict=True):
            put(axes, x * WIDTH, top + height - ROW, f"{name} = {length:.2f}", "center", bold=True, color=colour)

    return page([*heading(scene.title, ""), (height + 2, paint)])


def _describe(scene: Scene, vt: np.ndarray) -> str:
    longer, shorter = (float(np.linalg.norm(scene.image @ v)) for v in vt)
    shape = "a circle" if longer - shorter < 2 * NEAR else "an ellipse"
    (x, y) = scene.image @ vt[0]
    direction = round(float(np.degrees(np.arctan2(y, x))))
    return (
        f"{scene.title}: {shape} with half-axes {longer:.2f} and {shorter:.2f}; the first points {direction} degrees "
        f"above the horizontal. Behind it, dashed, the circle of inputs."
    )


def _outline(image: np.ndarray) -> np.ndarray:
    angle = np.linspace(0, 2 * np.pi, 73)
    return image @ np.array([np.cos(angle), np.sin(angle)])


def _ellipse(
    axes: Axes, centre: tuple[float, float], unit: float, image: np.ndarray, vt: np.ndarray, letters: str
) -> None:
    """Paint one image of the circle, with the circle itself behind it; y points up."""
    x0, y0 = centre

    def at(points: np.ndarray) -> np.ndarray:
        return np.stack([x0 + unit * points[0], y0 - unit * points[1]], axis=-1)

    axes.add_patch(Polygon(at(_outline(image)), closed=True, fc=LIGHT, ec=INK, lw=1.6, gid="image"))
    axes.add_patch(
        Polygon(at(_outline(np.eye(2))), closed=True, fc="none", ec=MUTED, lw=1, ls=(0, (3, 2)), gid="inputs")
    )
    for n, colour in enumerate((INK, ACCENT)):
        head = image @ vt[n]
        (x, y), (lx, ly) = at(head[:, None])[0], at((head * (1 + 13 / (unit * np.linalg.norm(head))))[:, None])[0]
        axes.add_patch(FancyArrowPatch((x0, y0), (x, y), arrowstyle="-|>", mutation_scale=11, color=colour, lw=2.2,
                                       shrinkA=0, shrinkB=0))  # fmt: skip
        if letters:
            put(axes, lx, ly - 7, letters.format("₁₂"[n]), "left" if lx > x + 6 else "center", True, color=colour)


# ---- The layer --------------------------------------------------------------------------------------------


def spectra(run: Mapping[str, Any]) -> tuple[Figure, str]:
    """Draw the singular values of a layer's gradient, momentum and weight; return the figure and its alt text."""
    values = {
        name: np.linalg.svd(np.asarray(run[name]), compute_uv=False) for name in ("gradient", "momentum", "weight")
    }
    shown = {name: np.where(s > 1e-9 * s[0], s / s[0], 0.0) for name, s in values.items()}
    zeros = {name: int((s == 0).sum()) for name, s in shown.items()}
    left_out = " and ".join(f"{count} of the {name}'s" for name, count in zeros.items() if count)
    title = "Gradients fall off steeply, weights hardly"
    note = (
        "Singular values at step 20, divided by the largest. Every line of the grid is ten times less. "
        f"Not drawn, because they are zero: {left_out}."
    )
    return draw_spectra(shown, title, note), describe_spectra(shown, title)


def after_one_step(run: Mapping[str, Any]) -> tuple[Figure, str]:
    """Draw the held-out loss after one step of several lengths; return the figure and its alt text."""
    lengths = np.asarray(run["lengths"])[:SHOWN]
    raw, polar = np.asarray(run["after_gradient"])[:, 1, :SHOWN]
    start = np.full(len(lengths), np.asarray(run["before"])[1])
    curves = {"raw gradient": (lengths, raw), "polar factor": (lengths, polar), "no step": (lengths, start)}
    labels = ("length of the step (spectral norm)", "loss on held-out digits after one step")
    title = "At every length the polar factor ends lower"
    return draw_curves(curves, *labels, title=title, log_x=True), describe_curves(curves, *labels, title=title)
