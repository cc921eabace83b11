"""Chapter 15's pictures: whether a step pays, and who orthogonalizes the same matrix on a planned grid."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from muonbook.figures.plots import describe_bars, draw_bars, head
from muonbook.figures.rank_grid import rank_grid
from muonbook.figures.style import CARD, INK, MARGIN, MUTED, card, mix
from muonbook.planner.choices.repeats import Repeats

SHOWN = ("bucketed", "flat", "owner")  # flat + cut is laid out as flat is
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
    return card(title, note, *(rank_grid(each.title, each.busy, _counted(each)) for each in found))


def describe_repeats(found: list[Repeats], title: str = "") -> str:
    """Return alt text for `draw_repeats`: on how many ranks, and how many it is over all matrices."""
    tp, dp = found[0].busy.shape
    told = (f"{each.title}: {_counted(each)}, {each.mean:.3g} on average over all matrices" for each in found)
    return f"{head(title, 'Ranks')} {dp} DP × {tp} TP ranks, those that orthogonalize one matrix. {'; '.join(told)}."


def _counted(each: Repeats) -> str:
    return f"{each.ranks} GPU{'s' * (each.ranks > 1)}"
