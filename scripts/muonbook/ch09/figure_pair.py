"""A pair of layers, cut for two TP ranks, as it runs: forward to one sum, and back to another.

The numbers are those of the chapter's small layers. What belongs to a rank has its hatch; what both hold is white.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from muonbook.ch09.small_layers import whole_numbers
from muonbook.figures.player import Frame
from muonbook.figures.style import ACCENT, INK, MARGIN, MUTED, ROW, TP_HATCHES, WIDTH, Block

from muonbook.figures.style import box, dp_colour, hatch_on, page, put  # isort: skip

CELL, RANKS = 26.0, 2
GAP = (WIDTH - 2 * MARGIN - 11 * CELL) / 2  # between tables side by side
BOTH, SUM = -1, -2  # instead of a rank: both hold it, both are in it


class Table(NamedTuple):
    """A matrix of numbers; `owners` says whose each column (or row, with `by_row`) is, or whose all of it is."""

    values: Tensor
    owners: Sequence[int]
    by_row: bool = False

    def owner(self, row: int, column: int) -> int:
        at = row if self.by_row else column
        return self.owners[at] if len(self.owners) > 1 else self.owners[0]


def pair() -> dict[str, Tensor]:
    """Return every tensor of the pair, in one process: forward, partial sums, and back."""
    X, W1, W2, dY = whole_numbers()
    H = F.relu(X @ W1.T)
    dH = torch.where(H > 0, dY @ W2, 0.0)
    found = {"X": X, "W1": W1.T, "H": H, "W2": W2.T, "dY": dY, "dH": dH, "Y": H @ W2.T, "dX": dH @ W1}
    for rank in range(RANKS):
        h, dh, w1, w2 = H.chunk(RANKS, 1), dH.chunk(RANKS, 1), W1.chunk(RANKS, 0), W2.chunk(RANKS, 1)
        found |= {f"Y{rank}": h[rank] @ w2[rank].T, f"dX{rank}": dh[rank] @ w1[rank]}
    return found


def frames_of_pair() -> list[Frame]:
    """Return the pair in one piece, cut, forward to the sum of Y, and back to the sum of X's gradient."""
    t = pair()
    cut, halves = [0, 0, 1, 1], [0] * 2 + [1] * 2
    whole = {name: Table(t[name], [BOTH]) for name in ("X", "W1", "H", "W2", "Y")}
    split = {
        "X": whole["X"],
        "W1": Table(t["W1"], cut),
        "W2": Table(t["W2"], halves, by_row=True),
    }
    forward = split | {"H": Table(t["H"], cut)}
    parts = [(f"Y of TP {r}", Table(t[f"Y{r}"], [r])) for r in range(RANKS)]
    back = {"W1": split["W1"], "W2": split["W2"], "dH": Table(t["dH"], cut), "dY": Table(t["dY"], [BOTH])}
    slopes = [(f"dX of TP {r}", Table(t[f"dX{r}"], [r])) for r in range(RANKS)]
    told = [
        (whole, [], "A pair of layers, in one process: H = relu(X W1ᵀ), Y = H W2ᵀ. Can two ranks share it?"),
        (split, [], "Cut W1 between its outputs and W2 between its inputs. X is on both ranks."),
        (forward, [], "Column parallel: each rank has its own columns of H, and relu asks nobody. Sends nothing."),
        (forward, parts, "Row parallel: each rank sums over the inputs it has. Two Y of full shape, both wrong."),
        (
            forward | {"Y": Table(t["Y"], [SUM])},
            parts,
            f"One all-reduce adds them: Y as in one piece. Each rank sends {t['Y'].numel() * 4} bytes.",
        ),
        (back, [], "Back: both have dY, and each rank computes its columns of dH from its block of W2."),
        (
            back | {"dX": Table(t["dX"], [SUM])},
            slopes,
            f"X was on both, so its gradient is a sum: one all-reduce, {t['dX'].numel() * 4} bytes. Weights' stay.",
        ),
    ]
    return [Frame(_draw(tables, sums), _describe(tables, sums, line), line) for tables, sums, line in told]


PLACES = {  # name -> its column and row among the tables, and how many cells it is wide; a product is under its factor
    "W1": (1, 0, 4), "W2": (2, 0, 3), "X": (0, 1, 4), "H": (1, 1, 4), "Y": (2, 1, 3),
    "dX": (0, 1, 4), "dH": (1, 1, 4), "dY": (2, 1, 3),
}  # fmt: skip
SHOWN = {"W1": "W1ᵀ", "W2": "W2ᵀ"}


def _draw(tables: dict[str, Table], sums: list[tuple[str, Table]]) -> Figure:
    def paint(axes: Axes, top: float) -> None:
        backward = "dY" in tables
        for name, (column, row, wide) in PLACES.items():
            x, y = MARGIN + column * (4 * CELL + GAP), top + ROW + row * (4 * CELL + ROW + 10)
            if name in tables:
                _table(axes, x, y, SHOWN.get(name, name), tables[name])
            elif name.startswith("d") == backward and row:  # still to come
                put(axes, x, y - ROW, name, color=MUTED)
                box(axes, x, y, wide * CELL, 2 * CELL, "none", ec=MUTED, lw=0.8, ls=(0, (2, 2)))
        _key(axes, MARGIN, top + ROW)
        y = top + 6 * CELL + 3 * ROW + 26
        for n, (name, table) in enumerate(sums):
            x = MARGIN + n * (4 * CELL + GAP)
            _table(axes, x, y, name, table)
            if n:
                put(axes, x - GAP / 2, y + CELL - 11, "+", "center", size=16, color=ACCENT, bold=True)

    body: Block = (8 * CELL + 3 * ROW + 28, paint)
    return page([body])


def _key(axes: Axes, x: float, y: float) -> None:
    for n, (name, hatch) in enumerate((("TP 0", TP_HATCHES[0]), ("TP 1", TP_HATCHES[1]))):
        box(axes, x, y + 20 * n + 1, 14, 12, dp_colour(0), hatch=hatch, ec=hatch_on(dp_colour(0)))
        put(axes, x + 20, y + 20 * n, name)
    box(axes, x, y + 41, 14, 12, "#FFFFFF", ec=MUTED, lw=0.8)
    put(axes, x + 20, y + 40, "both")


def _table(axes: Axes, x: float, y: float, name: str, table: Table) -> None:
    """Draw a matrix with its name above it, and a bold line where it is cut."""
    rows, columns = table.values.shape
    put(axes, x, y - ROW, name, bold=True)
    for row in range(rows):
        for column in range(columns):
            _cell(axes, x + column * CELL, y + row * CELL, f"{table.values[row, column]:g}", table.owner(row, column))
    if len(set(table.owners)) > 1 and table.by_row:
        axes.hlines(y + rows / RANKS * CELL, x - 5, x + columns * CELL + 5, ACCENT, lw=2.2)
    elif len(set(table.owners)) > 1:
        axes.vlines(x + columns / RANKS * CELL, y - 5, y + rows * CELL + 5, ACCENT, lw=2.2)


def _cell(axes: Axes, x: float, y: float, text: str, owner: int) -> None:
    colour = dp_colour(0)
    if owner == BOTH:
        box(axes, x + 0.7, y + 0.7, CELL - 1.4, CELL - 1.4, "#FFFFFF", ec=MUTED, lw=0.8, gid="both")
    elif owner == SUM:  # two stripes under the number
        box(axes, x + 0.7, y + 0.7, CELL - 1.4, CELL - 1.4, "#FFFFFF", ec=MUTED, lw=0.8, gid="sum")
        for rank in range(RANKS):
            looks = {"hatch": TP_HATCHES[rank], "ec": hatch_on(colour)}
            box(axes, x + 1 + rank * (CELL / 2 - 1), y + CELL - 7, CELL / 2 - 1, 6, colour, **looks)
    else:
        looks = {"hatch": TP_HATCHES[owner], "ec": hatch_on(colour), "gid": f"tp{owner}"}
        box(axes, x + 0.7, y + 0.7, CELL - 1.4, CELL - 1.4, colour, **looks)
        if TP_HATCHES[owner]:  # type on hatches is hard to read
            plate = 7.0 * len(text) + 3
            box(axes, x + (CELL - plate) / 2, y + 5, plate, CELL - 10, colour)
    put(axes, x + CELL / 2, y + (2 if owner == SUM else CELL / 2 - 7), text, "center", color=INK)


def _describe(tables: dict[str, Table], sums: list[tuple[str, Table]], line: str) -> str:
    told = [f"{SHOWN.get(name, name)} {_told(table)}" for name, table in [*tables.items(), *sums]]
    return f"{line} {'; '.join(told)}."


def _told(table: Table) -> str:
    rows = " / ".join(" ".join(f"{value:g}" for value in row) for row in table.values.tolist())
    whose = {BOTH: "on both ranks", SUM: "the sum on both ranks", 0: "on TP 0", 1: "on TP 1"}
    if len(set(table.owners)) > 1:
        return f"{rows}, {'rows' if table.by_row else 'columns'} halved over TP 0 and TP 1"
    return f"{rows}, {whose[table.owners[0]]}"
