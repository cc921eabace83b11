"""What is in a DP rank's hands when Newton–Schulz begins, algorithm by algorithm: its own shard, and what it received.

Seven matrices on four ranks, laid out by the planner of each algorithm; nothing is drawn that is not on the map.
"""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.sharding.layout import Layout, ParamSpec, Range
from muonbook.ch12.contenders import ALGORITHMS
from muonbook.figures.plots import head
from muonbook.figures.style import CARD, INK, MARGIN, MUTED, ROW, WIDTH, Block, box, card, dp_colour, mix, put
from muonbook.planner.owned_worlds import plan_part

D = 4
ROWS = (56, 96, 40, 64, 72, 48, 40)  # of seven matrices with 32 columns each
MATRICES = [ParamSpec(f"W{n}", (rows, 32), "float32") for n, rows in enumerate(ROWS)]
ELEMENTS = sum(spec.numel for spec in MATRICES)
BUCKET = 4096  # elements; a flat buffer is one bucket for all
LABELS, LINE, GAP = 42.0, 11.0, 3.0  # room for a rank's name; how high what it holds is; below each rank
ACROSS = WIDTH - 2 * MARGIN - LABELS


class HeldPiece(NamedTuple):
    """A run of the buffer that `holder` needs, and `owner` keeps."""

    holder: int
    owner: int
    where: Range

    @property
    def received(self) -> bool:
        return self.holder != self.owner


def laid_out(name: str) -> Layout:
    """Return the seven matrices as an algorithm of `ALGORITHMS` lays them out."""
    algorithm = ALGORITHMS[name]
    size = ELEMENTS if algorithm.flat else BUCKET
    return plan_part(MATRICES, range(len(MATRICES)), D, 1, size, algorithm.strategy).layout


def pieces(name: str) -> list[HeldPiece]:
    """Return all pieces that ranks hold when they orthogonalize: their own, and those they received."""
    layout, everybody = laid_out(name), ALGORITHMS[name].strategy == "gather_all"
    found = []
    for bucket in layout.buckets:
        for index in bucket.params:
            owners = layout.owners(bucket, index)
            held = [HeldPiece(owner, owner, layout.meta(bucket, index, owner).local_range) for owner in owners]
            for holder in range(D) if everybody else owners:
                found += [piece._replace(holder=holder) for piece in held]
    return found


def received(name: str) -> float:
    """Return which share of all elements a rank receives, mean over ranks."""
    return sum(p.where.size for p in pieces(name) if p.received) / (D * ELEMENTS)


def draw_pieces(title: str = "") -> Figure:
    """Draw, for every algorithm, the buffer from left to right and what each rank holds of it."""
    note = "What four DP ranks hold of seven matrices, between lines. Strong: kept. Pale: received."
    return card(title, note, *(_block(name) for name in ALGORITHMS))


def describe_pieces(title: str = "") -> str:
    """Return alt text for `draw_pieces`: what a rank receives, and among how many ranks the matrices are cut."""
    told = []
    for name, algorithm in ALGORITHMS.items():
        layout = laid_out(name)
        cut = [len(layout.owners(bucket, index)) for bucket in layout.buckets for index in bucket.params]
        told.append(f"{algorithm.title}: {sum(n > 1 for n in cut)} of {len(cut)} matrices are cut, a rank receives "
                    f"{100 * received(name):.0f} % of all")  # fmt: skip
    return f"{head(title, 'Pieces of matrices')} Seven matrices on four DP ranks. {'; '.join(told)}."


def _block(name: str) -> Block:
    layout, held = laid_out(name), pieces(name)
    scale = ACROSS / layout.buffers[0].size

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, ALGORITHMS[name].title, bold=True)
        put(axes, WIDTH - MARGIN, top + 6, f"receives {100 * received(name):.0f} %", "right", bold=True)
        y = top + 8 + ROW
        for rank in range(D):
            put(axes, MARGIN, y + rank * (LINE + GAP) - 1, f"rank {rank}", color=MUTED)
        for piece in held:
            colour = dp_colour(piece.owner)
            x, row = MARGIN + LABELS + scale * piece.where.start, y + piece.holder * (LINE + GAP)
            box(axes, x, row, scale * piece.where.size, LINE, mix(colour, CARD, 0.62) if piece.received else colour)
        for where in layout.global_ranges:
            for end in (where.start, where.end):
                axes.vlines([MARGIN + LABELS + scale * end], y - 2, y + D * (LINE + GAP) - 1, INK, lw=0.9)

    return 8 + ROW + D * (LINE + GAP) + 8, paint
