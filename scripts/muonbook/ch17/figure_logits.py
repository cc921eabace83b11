"""The largest attention logit, step by step: a line for each way to train, the threshold across."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from muonbook.figures.plots import draw_curves

AXES = ("step", "largest attention logit")
TITLE = "Attention's logits grow, unless they are clipped"
THRESHOLD = "threshold"


def draw_growth(largest: Mapping[str, Sequence[Sequence[float]]], tau: float) -> Figure:
    """Draw the median over seeds, and the range of all seeds around it. largest: {name: [seed][step]}."""
    curves, bands = _curves(largest, tau)
    figure = draw_curves(curves, *AXES, title=TITLE, note=_note(largest), log_y=True, bands=bands)
    for line in figure.findobj(lambda artist: artist.get_gid() == f"curve-{THRESHOLD}"):
        line.set(linewidth=1.2, zorder=1)  # a clipped run keeps to it, and must not be hidden
    return figure


def describe_growth(largest: Mapping[str, Sequence[Sequence[float]]], tau: float) -> str:
    """Return alt text for `draw_growth`."""
    curves, _ = _curves(largest, tau)
    told = [f"{name} {_where(y[-1] / tau)}" for name, (_, y) in curves.items() if name != THRESHOLD]
    steps = max(x[-1] for x, _ in curves.values())
    return (
        f"{TITLE}. The {AXES[1]} over {steps} steps, with a {THRESHOLD} of {tau:g}: {'; '.join(told)}. {_note(largest)}"
    )


def _where(share: float) -> str:
    """Say where a line ends. In words: the digits differ from one processor to the next."""
    return "ends far above it" if share > 8 else "ends above it" if share > 1.5 else "ends near it or below"


def _note(largest: Mapping[str, Sequence[Sequence[float]]]) -> str:
    seeds = len(next(iter(largest.values())))
    return "One seed." if seeds == 1 else f"Median of {seeds} seeds; shaded: all of them."


def _curves(
    largest: Mapping[str, Sequence[Sequence[float]]], tau: float
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any, Any]]]:
    """Return (series, bands) for `draw_curves`."""
    curves, bands = {}, {}
    for name, of_seeds in largest.items():
        values = np.asarray(of_seeds, dtype=float)  # [seeds, steps]
        steps = np.arange(1, values.shape[1] + 1)
        curves[name] = steps, np.median(values, axis=0)
        bands[name] = steps, values.min(0), values.max(0)
    curves[THRESHOLD] = steps[[0, -1]], np.full(2, tau)
    return curves, bands
