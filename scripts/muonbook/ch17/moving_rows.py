"""Rows of four matrices on four ranks, on their way to one owner each and back: MuonW's two collectives.

A column is a rank. A row of a matrix has the colour of the rank that it came from, or that computed it. Who holds which
rows is FSDP2's rule, and who owns what the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from matplotlib.axes import Axes

from distmuon.optim.newton_schulz import flops
from distmuon.sharding.boxes import boxes
from distmuon.sharding.ownership import balance
from muonbook.figures.player import Frame
from muonbook.figures.style import INK, MARGIN, MUTED, TEXT

from muonbook.figures.style import box, dp_colour, page, put  # isort: skip
from torch.distributed.tensor import Shard

RANKS = 4
MATRICES = {"A": (8, 8), "B": (8, 6), "C": (6, 8), "D": (3, 8)}  # rows, columns
LEFT, PITCH, ELEMENT, GAP, TOP = 40.0, 78.0, 6.0, 12.0, 46.0  # of the first column; between columns; of an element
Holder = Callable[[str, int, int], int | None]  # (matrix, its row, rank) -> whose colour it has there; None: not there


class RowScene(NamedTuple):
    """One frame."""

    title: str
    caption: str
    held: Holder


def owners() -> dict[str, int]:
    """Return who orthogonalizes which matrix."""
    costs = {i: float(flops(shape)) for i, shape in enumerate(MATRICES.values())}
    return dict(zip(MATRICES, (rank for _, rank in sorted(balance(costs, RANKS).items())), strict=True))


def held_by_fsdp2(matrix: str, row: int, rank: int) -> int | None:
    """Return the rank if it has this row after `fully_shard`."""
    rows, _ = boxes(MATRICES[matrix], (RANKS,), (Shard(0),))[rank]
    return rank if row in range(*rows) else None


def scenes() -> list[RowScene]:
    """Return the frames' contents, in order."""
    owner = owners()
    sender = {
        (m, row): rank
        for m, (rows, _) in MATRICES.items()
        for row in range(rows)
        for rank in range(RANKS)
        if held_by_fsdp2(m, row, rank) is not None
    }
    last = RANKS - 1
    missing = [
        m for m, (rows, _) in MATRICES.items() if all(held_by_fsdp2(m, row, last) is None for row in range(rows))
    ]
    return [
        RowScene(
            "What FSDP2 leaves behind",
            "Every rank holds rows of every matrix, and their momentum. Almost: torch hands out rows until there are "
            f"none left, and rank {last} gets nothing of {' and '.join(missing)}.",
            held_by_fsdp2,
        ),
        RowScene(
            "First all-to-all: momentum",
            "Rows travel to the owner of their matrix, those of all matrices in one message. Columns have become rows.",
            lambda m, row, rank: sender[m, row] if owner[m] == rank else None,
        ),
        RowScene(
            "Newton–Schulz",
            "Each owner has a whole matrix and orthogonalizes it. No matrix is done twice.",
            lambda m, row, rank: rank if owner[m] == rank else None,
        ),
        RowScene(
            "Second all-to-all: updates",
            "The same way back. Every rank has the update of its own rows, whoever computed it.",
            lambda m, row, rank: owner[m] if sender[m, row] == rank else None,
        ),
        RowScene(
            "The step is over",
            "Decay, scale, subtract: one element at a time, where it lies. FSDP2 has noticed nothing.",
            held_by_fsdp2,
        ),
    ]


def frames_of_rows() -> list[Frame]:
    """Return the frames of a step."""
    return [_frame(scene) for scene in scenes()]


def _frame(scene: RowScene) -> Frame:
    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top, scene.title, bold=True, size=TEXT)
        for rank in range(RANKS):
            put(axes, LEFT + PITCH * rank + 24, top + 24, f"rank {rank}", "center", color=MUTED)
        y = top + TOP
        for name, (rows, columns) in MATRICES.items():
            put(axes, MARGIN, y + ELEMENT * rows / 2 - 7, name)
            for rank in range(RANKS):
                _matrix(axes, LEFT + PITCH * rank, y, columns, [scene.held(name, row, rank) for row in range(rows)])
            y += ELEMENT * rows + GAP

    height = TOP + sum(ELEMENT * rows + GAP for rows, _ in MATRICES.values())
    counts = "; ".join(
        f"rank {rank} holds "
        + ", ".join(
            f"{sum(scene.held(m, row, rank) is not None for row in range(rows))} of {m}'s rows"
            for m, (rows, _) in MATRICES.items()
            if any(scene.held(m, row, rank) is not None for row in range(rows))
        )
        for rank in range(RANKS)
    )
    return Frame(page([(height, paint)]), f"{scene.title}: {counts}.", scene.caption)


def _matrix(axes: Axes, x: float, y: float, columns: int, colours: list[int | None]) -> None:
    for row, whose in enumerate(colours):
        if whose is not None:
            box(axes, x, y + ELEMENT * row, ELEMENT * columns, ELEMENT, dp_colour(whose), ec="#FFFFFF", lw=0.6)
    held = any(whose is not None for whose in colours)
    looks = {"ec": INK if held else "#DEDBD3", "lw": 0.9 if held else 0.6}
    box(axes, x, y, ELEMENT * columns, ELEMENT * len(colours), "none", **looks)
