"""Singular values on their way through the iterations, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MultipleLocator, NullLocator, StrMethodFormatter

from distmuon.optim.coefficients import MUON, Quintic
from muonbook.figures.healthy import HEALTHY, is_healthy
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_curves, draw_curves
from muonbook.figures.style import ACCENT, MARGIN, MUTED, PADDING, ROW, WIDTH, card, inset, put

AXIS = 34.0  # points, for the numbers left of a plot
SPECTRUM, CURVE = 150.0, 122.0  # heights of the two plots
VALUES = tuple(10.0 ** np.linspace(0, -3, 32))  # singular values of a matrix, before it is divided by its norm
SIX = (MUON,) * 6


# ---- The moving picture -----------------------------------------------------------------------------------


def frames_of_iterations(
    values: Sequence[float] | np.ndarray = VALUES, quintics: Sequence[Quintic] = SIX
) -> list[Frame]:
    """Return a moving picture: singular values, divided by the Frobenius norm, before and after each quintic.

    values: of one matrix, largest first. Dots on the curve stand at (before, after) of the iteration shown.
    """
    trail = trail_of(values, quintics)
    return [
        Frame(_draw(step, trail, quintics), _describe(step, trail), _caption(step, trail))
        for step in range(len(quintics) + 1)
    ]


def trail_of(values: Sequence[float] | np.ndarray, quintics: Sequence[Quintic]) -> np.ndarray:
    """Return the singular values, divided by the Frobenius norm, after 0, 1, 2, ... quintics: [steps + 1, values]."""
    s = np.asarray(values, dtype=float)
    seen = [s / np.sqrt((s**2).sum())]
    for a, b, c in quintics:
        seen.append(a * seen[-1] + b * seen[-1] ** 3 + c * seen[-1] ** 5)
    return np.stack(seen)


def _range(values: np.ndarray) -> str:
    return f"from {values.min():.2g} to {values.max():.2g}"


def _title(step: int) -> str:
    return f"After iteration {step}" if step else "Before the first iteration"


def _describe(step: int, trail: np.ndarray) -> str:
    near = is_healthy(trail[step]).sum()
    return f"{_title(step)}, {trail.shape[1]} singular values: {_range(trail[step])}, {near} near 1."


def _caption(step: int, trail: np.ndarray) -> str:
    if not step:
        return f"{trail.shape[1]} singular values {_range(trail[0])}. Where do the products take them?"
    near = is_healthy(trail[step]).sum()
    return f"{3 * step} products: {_range(trail[step])}, {near} of {trail.shape[1]} in the grey band."


def _draw(step: int, trail: np.ndarray, quintics: Sequence[Quintic]) -> Figure:
    return card(
        _title(step),
        "",
        (SPECTRUM + ROW + 16, lambda axes, top: _spectrum(axes, top, step, trail)),
        (CURVE + 3 * ROW + 14, lambda axes, top: _curve(axes, top, step, trail, quintics)),
    )


def _spectrum(axes: Axes, top: float, step: int, trail: np.ndarray) -> None:
    """Paint the values, in the order that they had at the start, on a logarithmic scale."""
    put(axes, MARGIN, top, f"singular values (grey: {HEALTHY[0]:.2f} to {HEALTHY[1]:.2f})", color=MUTED)
    plot = inset(axes, MARGIN + AXIS, top + ROW + 6, WIDTH - 2 * MARGIN - AXIS, SPECTRUM)
    plot.axhspan(*HEALTHY, color=PADDING, alpha=0.45, lw=0)
    count = trail.shape[1]
    plot.plot(np.arange(count), trail[step], "o", color=ACCENT, ms=5, gid="values")
    plot.set(yscale="log", ylim=(trail[0].min() / 1.6, 2.6), xlim=(-1, count), xticks=[])
    plot.yaxis.set_major_locator(FixedLocator([0.001, 0.01, 0.1, 1]))
    plot.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    plot.yaxis.set_minor_locator(NullLocator())
    plot.spines[["top", "right"]].set_visible(False)


def _curve(axes: Axes, top: float, step: int, trail: np.ndarray, quintics: Sequence[Quintic]) -> None:
    """Paint the polynomial of this iteration, with every value on it; before the first, the values wait at 0."""
    put(axes, MARGIN, top + 6, "after this iteration", color=MUTED)
    plot = inset(axes, MARGIN + AXIS, top + ROW + 12, WIDTH - 2 * MARGIN - AXIS, CURVE)
    far, before = float(trail.max()), max(step - 1, 0)
    s = np.linspace(0, max(1.25, far), 101)
    plot.plot(s, s, color=MUTED, lw=1, ls=(0, (2, 2)))
    a, b, c = quintics[before]
    plot.plot(s, a * s + b * s**3 + c * s**5, color=ACCENT, lw=1.4, gid="curve")
    after = trail[step] if step else np.zeros(trail.shape[1])
    plot.plot(trail[before], after, "o", color=ACCENT, ms=4.2, gid="on-curve")
    plot.xaxis.set_major_locator(MultipleLocator(0.5))
    plot.yaxis.set_major_locator(MultipleLocator(0.5))
    plot.set(xlim=(0, s[-1] + 0.03), ylim=(-0.06, max(1.35, far + 0.1)), xlabel="before this iteration")
    plot.spines[["top", "right"]].set_visible(False)


# ---- The plot: a figure and its alt text ------------------------------------------------------------


def draw_share(share: Callable[[int, int, int], float]) -> tuple[Figure, str]:
    """Draw what part of the forward and backward pass's operations Newton–Schulz takes: share(n, m, tokens)."""
    batches = [2**k for k in range(14, 23)]
    shapes = ((1024, 1024), (1024, 4096), (4096, 4096), (8192, 8192))
    series = {f"{n} × {m}": (batches, [100 * share(n, m, tokens) for tokens in batches]) for n, m in shapes}
    about = ("tokens in a step", "Newton–Schulz, % of forward and backward")
    title = "With twice the batch, Newton–Schulz costs half as much"
    return draw_curves(series, *about, title, log_x=True, log_y=True), describe_curves(series, *about, title)
