"""Who orthogonalizes the same matrix, algorithm by algorithm: every rank of a planned grid, a column per DP rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from distmuon.sharding.layout import ParamSpec
from muonbook.figures.plots import head
from muonbook.figures.style import ACCENT, CARD, MARGIN, MUTED, ROW, WIDTH, Block, card, mix, put
from muonbook.planner.algorithms import ALGORITHMS
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.owned_worlds import OwnedWorld
from muonbook.planner.parts.every_rank import Zero1Part
from muonbook.planner.planned_worlds import specs_of

SHOWN = ("bucketed", "flat", "owner")  # flat + cut is laid out as flat is
HIGH = 4.6  # a rank
ACROSS = WIDTH - 2 * MARGIN


class Repeats(NamedTuple):
    """An algorithm's ranks. busy: [T, D] bool, those that orthogonalize the matrix; mean: of all matrices, how many
    ranks do the same one, weighted by operations."""

    title: str
    busy: np.ndarray
    mean: float

    @property
    def ranks(self) -> int:
        return int(self.busy.sum())


def repeats(model: str, dp: int, tp: int, matrix: str) -> list[Repeats]:
    """Lay a model out by every algorithm of `SHOWN` and look one of its matrices up.

    Raises ValueError, naming the matrix, where Muon has none of that name.
    """
    specs, indices = specs_of(MODELS[model], tp)
    named = [index for index in indices if specs[index].name == matrix]
    if not named:
        raise ValueError(f"Muon has no matrix {matrix!r} in {model}; its first is {specs[min(indices)].name!r}.")
    return [_repeats(name, specs, indices, dp, tp, named[0]) for name in SHOWN]


def _repeats(name: str, specs: Sequence[ParamSpec], indices: frozenset[int], dp: int, tp: int, index: int) -> Repeats:
    part = ALGORITHMS[name].lay_out(specs, indices, dp, tp)
    assert isinstance(part, Zero1Part)
    world, busy = part.world, np.zeros((tp, dp), bool)
    if isinstance(world, OwnedWorld):
        owner = world.dealt[index]
        assert owner.tp is not None, "planned matrices are whole ones"
        busy[owner.tp, owner.dp] = True
    else:
        (found,) = (row for _, rows in world.matrices for row in rows if row.place == index)
        busy[:, found.slice] = True
    return Repeats(ALGORITHMS[name].title, busy, world.redundancy[0])


def draw_repeats(found: list[Repeats], title: str = "") -> Figure:
    """Draw every rank of the grid, in red those that orthogonalize the matrix."""
    tp, dp = found[0].busy.shape
    note = f"A column: a DP rank, {tp} TP ranks high; {dp} columns. Red: does all of Newton–Schulz for this one matrix."
    return card(title, note, *map(_block, found))


def describe_repeats(found: list[Repeats], title: str = "") -> str:
    """Return alt text for `draw_repeats`: on how many ranks, and how many it is over all matrices."""
    tp, dp = found[0].busy.shape
    told = (f"{each.title}: {_counted(each)}, {each.mean:.3g} in the mean of all matrices" for each in found)
    return f"{head(title, 'Ranks')} {dp} DP × {tp} TP ranks, those that orthogonalize one matrix. {'; '.join(told)}."


def _counted(each: Repeats) -> str:
    return f"{each.ranks} GPU{'s' * (each.ranks > 1)}"


def _block(each: Repeats) -> Block:
    tp, dp = each.busy.shape

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, each.title)
        put(axes, WIDTH - MARGIN, top + 6, _counted(each), "right", bold=True)
        x, y = np.linspace(MARGIN, MARGIN + ACROSS, dp + 1), top + 8 + ROW + HIGH * np.arange(tp + 1)
        colours = np.where(each.busy[..., None], to_rgb(ACCENT), to_rgb(mix(MUTED, CARD, 0.75)))
        axes.pcolormesh(x, y, colours, edgecolors=CARD, linewidth=0.35, gid=f"ranks-{each.title}")

    return 8 + ROW + HIGH * tp + 8, paint
