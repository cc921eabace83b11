"""A bar in parts with its key below: what something consists of, and perhaps how much of it there may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes

from muonbook.figures.style import ACCENT, CARD, MARGIN, MUTED, ROW, WIDTH

from muonbook.figures.style import box, put  # isort: skip

BAR, WIDE = 20.0, WIDTH - 2 * MARGIN


def height(parts: Mapping[str, float]) -> float:
    """Return how much room `paint` takes."""
    return BAR + 16 + ROW * len(parts)


def paint(
    axes: Axes, top: float, parts: Mapping[str, float], looks: Sequence[str], in_words: Callable[[float], str],
    limit: float = 0.0,
) -> None:  # fmt: skip
    """Paint the bar and its key.

    looks: colours, at least as many as parts. tell: a part's size in words. limit: where a dashed line stands, in the
    parts' unit; 0: nowhere.
    """
    whole, x = max(sum(parts.values()), limit), MARGIN
    for row, (name, part, look) in enumerate(zip(parts, parts.values(), looks[: len(parts)], strict=True)):
        width = WIDE * part / whole
        box(axes, x, top + 4, width, BAR, look, ec=CARD, lw=0.6)
        x += width
        y = top + BAR + 12 + ROW * row
        box(axes, MARGIN, y + 2, 10, 10, look)
        put(axes, MARGIN + 16, y, name, color=MUTED)
        put(axes, WIDTH - MARGIN, y, in_words(part), "right", color=MUTED)
    if limit:
        end = MARGIN + WIDE * limit / whole
        axes.vlines([end], top, top + BAR + 7, ACCENT, linestyles=(0, (3, 1.5)), lw=2)
