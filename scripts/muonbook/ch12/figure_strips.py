"""Why large models stand near 1: the same seven boundaries through models of ever more matrices.

Equal matrices in one flat buffer on eight ranks, laid out by the planner of `gather_cut`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.sharding.layout import Layout, ParamSpec
from muonbook.figures.plots import head
from muonbook.figures.style import ACCENT, CARD, INK, MARGIN, MUTED, ROW, WIDTH, Block, box, card, mix, put
from muonbook.measure import formulas
from muonbook.planner.owned_worlds import plan_part

D = 8
SHAPE = (8, 8)  # of every matrix: in shards of an odd number of them no boundary falls between two
HIGH, OUT = 20.0, 5.0  # a strip; how far boundaries stick out
ACROSS = WIDTH - 2 * MARGIN


class Strip(NamedTuple):
    """A model in one flat buffer. spread: on how many ranks each matrix lies; ratio: Muon / ZeRO-1 AdamW, in bytes."""

    layout: Layout
    spread: list[int]
    ratio: Fraction


def strip(matrices: int) -> Strip:
    """Lay out so many equal matrices."""
    specs = [ParamSpec(f"W{n}", SHAPE, "float32") for n in range(matrices)]
    layout = plan_part(specs, range(matrices), D, 1, sum(spec.numel for spec in specs), "gather_cut").layout
    (bucket,) = layout.buckets
    spread = [len(layout.owners(bucket, index)) for index in bucket.params]
    s = formulas.mean_owners(layout, range(matrices))
    return Strip(layout, spread, formulas.ratio("gather_cut", D, 1, g=4, w=4, m=2, s=s))  # in the paper's dtypes


def draw_strips(sizes: Sequence[int], title: str = "") -> Figure:
    """Draw a strip for every number of matrices: those that a boundary cuts in red, and the ratio beside it."""
    return card(title, "Eight DP ranks, seven boundaries. Red: cut, so that it has to travel.", *map(_block, sizes))


def describe_strips(sizes: Sequence[int], title: str = "") -> str:
    """Return alt text for `draw_strips`: how many matrices are cut, and what that makes of the ratio."""
    told = []
    for size in sizes:
        found = strip(size)
        told.append(f"{_named(size)}, {sum(s > 1 for s in found.spread)} cut: {float(found.ratio):.3f}")
    return f"{head(title, 'Boundaries and matrices')} Eight DP ranks, bytes of Muon / ZeRO-1 AdamW. {'; '.join(told)}."


def _named(size: int) -> str:
    return f"{size} {'matrix' if size == 1 else 'matrices'}"


def _block(size: int) -> Block:
    layout, spread, ratio = strip(size)
    scale = ACROSS / layout.buffers[0].size

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, _named(size))
        put(axes, WIDTH - MARGIN, top + 6, f"{float(ratio):.3f} ×", "right", bold=True)
        y = top + 8 + ROW + OUT
        for where, ranks in zip(layout.global_ranges, spread, strict=True):
            colour = ACCENT if ranks > 1 else mix(MUTED, CARD, 0.7)
            x, gid = MARGIN + scale * where.start, f"matrix-{size}"
            box(axes, x, y, scale * where.size, HIGH, colour, ec=CARD, lw=0.7, gid=gid)
        ends = [MARGIN + ACROSS * rank / D for rank in range(1, D)]
        axes.vlines(ends, y - OUT, y + HIGH + OUT, INK, lw=1.1, gid=f"boundaries-{size}")

    return 8 + ROW + HIGH + 2 * OUT + 6, paint
