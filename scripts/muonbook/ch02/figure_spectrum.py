"""Singular values on their way through the iterations, with the polynomial that moves them below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MultipleLocator, NullLocator, StrMethodFormatter

from distmuon.optim.coefficients import Quintic
from muonbook.figures.healthy import HEALTHY, is_healthy
from muonbook.figures.player import Frame
from muonbook.figures.style import ACCENT, INK, MARGIN, MUTED, PADDING, ROW, WIDTH, Block, card, inset, put

AXIS = 34.0  # points, for the numbers left of a plot
SPECTRUM, CURVE = 150.0, 122.0  # heights of the two plots
LOOKS = ((ACCENT, "o"), (INK, "D"))  # of the first schedule and of the second


def frames_of_iterations(
    values: Sequence[float] | np.ndarray, schedules: Mapping[str, Sequence[Quintic]]
) -> list[Frame]:
    """Return a moving picture: singular values, divided by the Frobenius norm, before and after each quintic.

    values: of one matrix, largest first. schedules: name -> its quintics; one or two, of one length. Dots on the curve
    stand at (before, after) of the iteration shown. Raises ValueError for other schedules.
    """
    if not 1 <= len(schedules) <= len(LOOKS) or len({len(schedule) for schedule in schedules.values()}) != 1:
        raise ValueError("a picture has room for one schedule, or for two of the same length.")
    trails = {name: trail_of(values, schedule) for name, schedule in schedules.items()}
    steps = len(next(iter(schedules.values())))
    return [
        Frame(_draw(step, trails, schedules), _told(step, trails), _caption(step, trails)) for step in range(steps + 1)
    ]


def trail_of(values: Sequence[float] | np.ndarray, schedule: Sequence[Quintic]) -> np.ndarray:
    """Return the singular values, divided by the Frobenius norm, after 0, 1, 2, ... quintics: [steps + 1, values]."""
    s = np.asarray(values, dtype=float)
    seen = [s / np.sqrt((s**2).sum())]
    for a, b, c in schedule:
        seen.append(a * seen[-1] + b * seen[-1] ** 3 + c * seen[-1] ** 5)
    return np.stack(seen)


def _range(values: np.ndarray) -> str:
    return f"from {values.min():.2g} to {values.max():.2g}"


def _told(step: int, trails: Mapping[str, np.ndarray]) -> str:
    count = len(next(iter(trails.values()))[0])
    when = f"After iteration {step}" if step else "Before the first iteration"
    near = (f"{name}: {_range(trail[step])}, {_arrived(trail[step])} near 1" for name, trail in trails.items())
    return f"{when}, {count} singular values. {'; '.join(near)}."


def _arrived(values: np.ndarray) -> int:
    return int(is_healthy(values).sum())


def _caption(step: int, trails: Mapping[str, np.ndarray]) -> str:
    if not step:
        first = next(iter(trails.values()))[0]
        question = "Where do the products take them?" if len(trails) == 1 else "Which way is better?"
        return f"{len(first)} singular values {_range(first)}. {question}"
    if len(trails) == 1:
        (trail,) = trails.values()
        arrived = _arrived(trail[step])
        return f"{3 * step} products: {_range(trail[step])}, {arrived} of {trail.shape[1]} in the grey band."
    return "; ".join(f"{name} {_range(trail[step])}" for name, trail in trails.items()) + "."


def _draw(step: int, trails: Mapping[str, np.ndarray], schedules: Mapping[str, Sequence[Quintic]]) -> Figure:
    blocks: list[Block] = [(SPECTRUM + ROW + 16, lambda axes, top: _spectrum(axes, top, step, trails))]
    blocks.append((CURVE + 3 * ROW + 14, lambda axes, top: _curve(axes, top, step, trails, schedules)))
    if len(trails) > 1:
        blocks.insert(0, (ROW + 6, lambda axes, top: _key(axes, top, list(trails))))
    return card(f"After iteration {step}" if step else "Before the first iteration", "", *blocks)


def _key(axes: Axes, top: float, names: Sequence[str]) -> None:
    for n, (name, (colour, marker)) in enumerate(zip(names, LOOKS, strict=False)):
        axes.plot([MARGIN + 5 + 130 * n], [top + 6], marker, color=colour, ms=6)
        put(axes, MARGIN + 16 + 130 * n, top, name, bold=True, color=colour)


def _spectrum(axes: Axes, top: float, step: int, trails: Mapping[str, np.ndarray]) -> None:
    """Paint the values, in the order that they had at the start, on a logarithmic scale."""
    put(axes, MARGIN, top, f"singular values (grey: {HEALTHY[0]:.2f} to {HEALTHY[1]:.2f})", color=MUTED)
    plot = inset(axes, MARGIN + AXIS, top + ROW + 6, WIDTH - 2 * MARGIN - AXIS, SPECTRUM)
    plot.axhspan(*HEALTHY, color=PADDING, alpha=0.45, lw=0)
    shift = 0.16 * (len(trails) - 1)
    for n, ((colour, marker), trail) in enumerate(zip(LOOKS, trails.values(), strict=False)):
        places = np.arange(trail.shape[1]) + shift * (2 * n - 1)
        plot.plot(places, trail[step], marker, color=colour, ms=4.2 if len(trails) > 1 else 5, gid=f"values-{n}")
    first = next(iter(trails.values()))[0]
    plot.set(yscale="log", ylim=(first.min() / 1.6, 2.6), xlim=(-1, len(first)), xticks=[])
    plot.yaxis.set_major_locator(FixedLocator([0.001, 0.01, 0.1, 1]))
    plot.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    plot.yaxis.set_minor_locator(NullLocator())
    plot.spines[["top", "right"]].set_visible(False)


def _curve(
    axes: Axes, top: float, step: int, trails: Mapping[str, np.ndarray], schedules: Mapping[str, Sequence[Quintic]]
) -> None:
    """Paint the polynomial of this iteration, with every value on it; before the first, the values wait at 0."""
    put(axes, MARGIN, top + 6, "after this iteration", color=MUTED)
    plot = inset(axes, MARGIN + AXIS, top + ROW + 12, WIDTH - 2 * MARGIN - AXIS, CURVE)
    far = max(float(trail.max()) for trail in trails.values())
    s = np.linspace(0, max(1.25, far), 101)
    plot.plot(s, s, color=MUTED, lw=1, ls=(0, (2, 2)))
    for n, (name, trail) in enumerate(trails.items()):
        colour, marker = LOOKS[n]
        a, b, c = schedules[name][max(step - 1, 0)]
        plot.plot(s, a * s + b * s**3 + c * s**5, color=colour, lw=1.4, gid=f"curve-{n}")
        after = trail[step] if step else np.zeros(trail.shape[1])
        plot.plot(trail[max(step - 1, 0)], after, marker, color=colour, ms=4.2, gid=f"on-curve-{n}")
    plot.xaxis.set_major_locator(MultipleLocator(0.5))
    plot.yaxis.set_major_locator(MultipleLocator(0.5))
    plot.set(xlim=(0, s[-1] + 0.03), ylim=(-0.06, max(1.35, far + 0.1)), xlabel="before this iteration")
    plot.spines[["top", "right"]].set_visible(False)
