"""Chapter 15's pictures: whether a step pays, and who orthogonalizes the same matrix on a planned grid."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from muonbook.ch15.experiments import Repeats
from muonbook.figures.plots import describe_bars, draw_bars, head
from muonbook.figures.style import ACCENT, CARD, INK, MARGIN, MUTED, ROW, WIDTH, Block, card, mix, put

SHOWN = ("muon", "muon_flat", "muon_owner")  # gather cut is laid out as gather all, flat is
HIGH = 4.6  # a rank
ACROSS = WIDTH - 2 * MARGIN
FINEST = 2.0  # how wide a rank must be for lines between ranks
EVEN = (4 / 3, 2.0)  # a step may be so many times as long, if Muon needs three quarters or half of AdamW's steps
_EVEN_NOTE = (
    "Nothing is gained beyond the solid line (1.33) if Muon needs three quarters of AdamW's steps, "
    "and beyond the dashed line (2) if it needs half of them."
)


def draw_step_ratios(ratios: Mapping[str, float], title: str, note: str) -> Figure:
    """Draw a step of Muon over one of AdamW, by layout, with a line where nothing is gained, for each of `EVEN`."""
    light = {"": mix(MUTED, CARD, 0.5)}  # lines have to show on bars
    figure = draw_bars(ratios, title, f"{note} {_EVEN_NOTE}", "×", level=EVEN[1], most=EVEN[1], colours=light)
    axes = figure.axes[0]
    for line in axes.collections:
        gid = line.get_gid() or ""
        if isinstance(line, LineCollection) and gid.startswith("level-"):
            ((x, top), (_, bottom)) = line.get_segments()[0]
            early = MARGIN + (x - MARGIN) * EVEN[0] / EVEN[1]
            line.set_color(INK)
            axes.vlines([early], top, bottom, INK, lw=1, gid=gid.replace("level", "early"))
    return figure


def describe_step_ratios(ratios: Mapping[str, float], title: str, note: str) -> str:
    """Return alt text for `draw_step_ratios`, with every ratio."""
    return f"{describe_bars(ratios, title, '×')} {_EVEN_NOTE}"


def draw_repeats(found: list[Repeats], title: str = "") -> Figure:
    """Draw every rank of the grid, in red those that orthogonalize the matrix."""
    tp, dp = found[0].busy.shape
    note = f"A column: a DP rank, {tp} TP ranks high; {dp} columns. Red: does all of Newton–Schulz for this one matrix."
    return card(title, note, *(_rank_grid(each.title, each.busy, _counted(each)) for each in found))


def describe_repeats(found: list[Repeats], title: str = "") -> str:
    """Return alt text for `draw_repeats`: on how many ranks, and how many it is over all matrices."""
    tp, dp = found[0].busy.shape
    told = (f"{each.title}: {_counted(each)}, {each.mean:.3g} on average over all matrices" for each in found)
    return f"{head(title, 'Ranks')} {dp} DP × {tp} TP ranks, those that orthogonalize one matrix. {'; '.join(told)}."


def _counted(each: Repeats) -> str:
    return f"{each.ranks} GPU{'s' * (each.ranks > 1)}"


def _rank_grid(title: str, busy: np.ndarray, told: str) -> Block:
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
