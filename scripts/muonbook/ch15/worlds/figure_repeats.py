"""Who orthogonalizes the same matrix, algorithm by algorithm: every rank of a planned grid, a column per DP rank."""

from __future__ import annotations

from matplotlib.figure import Figure

from muonbook.figures.plots import head
from muonbook.figures.rank_grid import rank_grid
from muonbook.figures.style import card
from muonbook.planner.choices.repeats import Repeats

SHOWN = ("bucketed", "flat", "owner")  # flat + cut is laid out as flat is


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
