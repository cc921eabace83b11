"""Measurements as cards: bars and matrices, and the curves of `figure_curves`, for what belongs to no rank."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from muonbook.figures.curves import (
    card,
    describe_curves,
    describe_spectra,
    draw_curves,
    draw_spectra,
    head,
    short,
)
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, MUTED, PADDING, ROW, WIDTH, Block

from muonbook.figures.style import box, in_bytes, inset, mix, put, wide  # isort: skip

__all__ = [
    "describe_bars", "describe_curves", "describe_matrices", "describe_spectra",
    "draw_bars", "draw_curves", "draw_matrices", "draw_spectra",
]  # fmt: skip

Parts = Mapping[str, float]
SHADES = ((INK, ""), (mix(MUTED, CARD, 0.5), ""), (ACCENT, ""), (CARD, "////"), (mix(ACCENT, CARD, 0.6), ""))
DIVERGING = LinearSegmentedColormap.from_list("diverging", [COLD, CARD, ACCENT])


def draw_bars(
    rows: Mapping[str, float | Parts], title: str = "", note: str = "", unit: str = "B", grouped: bool = False
) -> Figure:
    """Draw horizontal bars with their values.

    rows: label -> value, or label -> {part: value}: parts are stacked, or drawn one under the other if `grouped`.
    unit: "B" prints kB, MB, GB; any other is printed after three digits. Raises ValueError for no rows, more than five
    parts, and values that are negative or not finite.
    """
    split, parts = _parts(rows)
    total = max(max(p.values()) if grouped else sum(p.values()) for p in split.values()) or 1.0
    scale, thick = (WIDTH - 2 * MARGIN) / total, 9.0 if grouped and len(parts) > 1 else 15.0
    looks = {"": (MUTED, "")} if parts == [""] else dict(zip(parts, SHADES, strict=False))
    pitch = ROW + 12 + thick * (len(parts) if grouped else 1)

    def bar(axes: Axes, x: float, y: float, label: str, part: str) -> float:
        colour, hatch = looks[part]
        width = split[label].get(part, 0.0) * scale
        box(axes, x, y, width, thick - 1, colour, hatch=hatch, ec=INK, lw=0.8 * bool(hatch), gid=f"bar-{label}-{part}")
        return width

    def paint(axes: Axes, top: float) -> None:
        for label, values in split.items():
            put(axes, MARGIN, top + 6, label)
            amounts = " / ".join(_amount(v, unit) for v in values.values())
            put(
                axes,
                WIDTH - MARGIN,
                top + 6,
                amounts if grouped else _amount(sum(values.values()), unit),
                "right",
                True,
            )
            x, y = MARGIN, top + 6 + ROW
            for part in parts:
                width = bar(axes, x, y, label, part)
                x, y = (x, y + thick) if grouped else (x + width, y)
            top += pitch

    return card(title, note, *_key(looks), (pitch * len(split), paint))


def describe_bars(rows: Mapping[str, float | Parts], title: str = "", unit: str = "B", **_: Any) -> str:
    """Return alt text for `draw_bars`, with every value."""
    split, parts = _parts(rows)
    told = []
    for label, values in split.items():
        inner = ", ".join(f"{part} {_amount(value, unit)}" for part, value in values.items())
        told.append(f"{label}: {inner if len(parts) > 1 else _amount(sum(values.values()), unit)}")
    return f"{head(title, 'Bars')} {'; '.join(told)}."


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


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return in_bytes(value)
    return f"{value:,.0f} {unit}".strip() if value >= 1000 else f"{value:.3g} {unit}".strip()


def _parts(rows: Mapping[str, float | Parts]) -> tuple[dict[str, Parts], list[str]]:
    """Return rows with their parts, and all parts in order of appearance; a plain value is one part without a name."""
    split: dict[str, Parts] = {label: v if isinstance(v, Mapping) else {"": float(v)} for label, v in rows.items()}
    parts = list(dict.fromkeys(part for values in split.values() for part in values))
    if not split or not 1 <= len(parts) <= len(SHADES):
        raise ValueError(f"{len(split)} rows of {len(parts)} parts; bars need a row, and 1 to {len(SHADES)} parts.")
    for label, values in split.items():
        if bad := [value for value in values.values() if not (isfinite(value) and value >= 0)]:
            raise ValueError(f"bar {label!r} is {bad[0]}; a bar has a length, 0 or more.")
    return split, parts


def _key(looks: Mapping[str, tuple[str, str]]) -> list[Block]:
    """Return what the parts look like, in as many lines as they need; nothing for one part without a name."""
    if set(looks) == {""}:
        return []
    places: list[tuple[float, float]] = []
    x, y = MARGIN, 4.0
    for part in looks:
        if x > MARGIN and x + 20 + wide(part) > WIDTH - MARGIN:
            x, y = MARGIN, y + ROW + 2
        places.append((x, y))
        x += 34 + wide(part)

    def paint(axes: Axes, top: float) -> None:
        for (part, (colour, hatch)), (x, y) in zip(looks.items(), places, strict=True):
            box(axes, x, top + y + 1, 14, 10, colour, hatch=hatch, ec=INK, lw=0.8 * bool(hatch))
            put(axes, x + 20, top + y, part)

    return [(y + ROW + 4, paint)]


def _matrices(matrices: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if not 1 <= len(matrices) <= 4:
        raise ValueError(f"{len(matrices)} matrices; a picture has room for 1 to 4.")
    arrays = {name: np.asarray(matrix, dtype=float) for name, matrix in matrices.items()}
    for name, array in arrays.items():
        if array.ndim != 2 or not array.size or not np.isfinite(array).all():
            raise ValueError(f"{name!r} has shape {array.shape}; a heat map is of a finite matrix.")
    return arrays
