"""A strip of ranks: a column per DP rank, as many TP ranks high, some of them red."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from muonbook.figures.style import ACCENT, CARD, MARGIN, MUTED, ROW, WIDTH, Block, mix, put

HIGH = 4.6  # a rank
ACROSS = WIDTH - 2 * MARGIN
FINEST = 2.0  # how wide a rank must be for lines beside it


def rank_grid(title: str, busy: np.ndarray, told: str) -> Block:
    """Return a strip under its title, and `told` at the right. busy: [T, D] bool, the red ones."""
    tp, dp = busy.shape

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, title)
        put(axes, WIDTH - MARGIN, top + 6, told, "right", bold=True)
        x, y = np.linspace(MARGIN, MARGIN + ACROSS, dp + 1), top + 8 + ROW + HIGH * np.arange(tp + 1)
        colours = np.where(busy[..., None], to_rgb(ACCENT), to_rgb(mix(MUTED, CARD, 0.75)))
        between = CARD if ACROSS / dp > FINEST else "none"
        axes.pcolormesh(x, y, colours, edgecolors=between, linewidth=0.35, gid=f"ranks-{title}")

    return 8 + ROW + HIGH * tp + 8, paint
