"""Matrices side by side as heat maps, on a scale around zero.

`describe_matrices` takes what `draw_matrices` takes and tells the same numbers in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from muonbook.figures.plots import head, short
from muonbook.figures.style import ACCENT, CARD, COLD, MARGIN, MUTED, PADDING, ROW, WIDTH, card, inset, put

DIVERGING = LinearSegmentedColormap.from_list("diverging", [COLD, CARD, ACCENT])


def draw_matrices(matrices: Mapping[str, Any], title: str = "", note: str = "", shared: bool = True) -> Figure:
    """Draw up to four matrices side by side as heat maps: negative cold, zero blank, positive warm.

    shared: one scale for all, which ends at the largest magnitude; otherwise each has its own, written over it.

    Raises ValueError for no matrices, more than four, and what is not a finite matrix.
    """
    arrays = _matrices(matrices)
    across = (WIDTH - 2 * MARGIN - 10 * (len(arrays) - 1)) / len(arrays)
    scale = min(min(across / a.shape[1], 240 / a.shape[0]) for a in arrays.values())
    tallest = scale * max(a.shape[0] for a in arrays.values())
    limits = {name: float(np.abs(a).max()) or 1.0 for name, a in arrays.items()}
    if shared:
        limits = dict.fromkeys(limits, max(limits.values()))
    head_high = 8 + ROW * (1 if shared else 2)

    def paint(axes: Axes, top: float) -> None:
        for n, (name, array) in enumerate(arrays.items()):
            x, rows, columns = MARGIN + n * (across + 10), *array.shape
            put(axes, x, top + 4, name, bold=True)
            if not shared:
                put(axes, x, top + 4 + ROW, f"± {short(limits[name])}", color=MUTED)
            inner = inset(axes, x, top + head_high, columns * scale, rows * scale)
            inner.imshow(
                array, cmap=DIVERGING, vmin=-limits[name], vmax=limits[name], aspect="auto", interpolation="nearest"
            )
            inner.set(xticks=[], yticks=[])
            inner.spines[:].set(color=PADDING, lw=0.8)
        told = "from − to +" if not shared else f"−{short(max(limits.values()))} to {short(max(limits.values()))}"
        y = top + head_high + tallest + 12
        bar = inset(axes, MARGIN, y, 120, 9)
        bar.imshow(np.linspace(-1, 1, 128)[None], cmap=DIVERGING, aspect="auto")
        bar.set(xticks=[], yticks=[])
        put(axes, MARGIN + 130, y - 3, f"{told}, blank is zero", color=MUTED)

    return card(title, note, (head_high + tallest + 12 + ROW, paint))


def describe_matrices(matrices: Mapping[str, Any], title: str = "", **_: Any) -> str:
    """Return alt text for `draw_matrices`: per matrix its shape, its least and its greatest element."""
    told = [
        f"{name}: {a.shape[0]:,} × {a.shape[1]:,}, from {short(a.min())} to {short(a.max())}"
        for name, a in _matrices(matrices).items()
    ]
    return f"{head(title, 'Matrices')} {'; '.join(told)}."


def _matrices(matrices: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if not 1 <= len(matrices) <= 4:
        raise ValueError(f"{len(matrices)} matrices; a picture has room for 1 to 4.")
    arrays = {name: np.asarray(matrix, dtype=float) for name, matrix in matrices.items()}
    for name, array in arrays.items():
        if array.ndim != 2 or not array.size or not np.isfinite(array).all():
            raise ValueError(f"{name!r} has shape {array.shape}; a heat map is of a finite matrix.")
    return arrays
