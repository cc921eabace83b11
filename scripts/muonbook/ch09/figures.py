"""Chapter 9's pictures: a pair of cut layers, a transformer block cut by heads, and what blocks alone come to.

The numbers of the pair are those of the chapter's small layers. What belongs to a rank has its hatch, and what both
ranks hold is white.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, radians, sin, sqrt
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Circle, FancyArrowPatch
from torch import Tensor
from torch.nn import functional as F

from distmuon.optim.newton_schulz import newton_schulz, singular_values
from muonbook.ch09.small_layers import whole_numbers
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_curves, draw_curves
from muonbook.figures.style import ACCENT, INK, MARGIN, MUTED, ROW, TP_HATCHES, WIDTH, Block

from muonbook.figures.style import box, card, dp_colour, hatch_on, page, put, wide  # isort: skip

# ---- A pair of layers, forward to one sum and back to another ----

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
    tensors = {"X": X, "W1": W1.T, "H": H, "W2": W2.T, "dY": dY, "dH": dH, "Y": H @ W2.T, "dX": dH @ W1}
    for rank in range(RANKS):
        h, dh, w1, w2 = H.chunk(RANKS, 1), dH.chunk(RANKS, 1), W1.chunk(RANKS, 0), W2.chunk(RANKS, 1)
        tensors |= {f"Y{rank}": h[rank] @ w2[rank].T, f"dX{rank}": dh[rank] @ w1[rank]}
    return tensors


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
        (
            whole,
            [],
            "One process computes two layers, H = relu(X W1ᵀ) and Y = H W2ᵀ. Two ranks shall share the work.",
        ),
        (split, [], "We cut W1 between its outputs and W2 between its inputs. Both ranks have all of X."),
        (
            forward,
            [],
            "Column parallel: each rank computes its own columns of H and applies relu to them. Nothing is sent.",
        ),
        (
            forward,
            parts,
            "Row parallel: each rank sums over the inputs that it has, so its Y is only a part of the sum.",
        ),
        (
            forward | {"Y": Table(t["Y"], [SUM])},
            parts,
            f"One all-reduce adds the parts, so both have the right Y. Each rank sends {4 * t['Y'].numel()} bytes.",
        ),
        (
            back,
            [],
            "In the backward pass both ranks have dY, and each computes its columns of dH from its block of W2.",
        ),
        (
            back | {"dX": Table(t["dX"], [SUM])},
            slopes,
            f"Both ranks used X, so its gradient is a sum. Its all-reduce sends {4 * t['dX'].numel()} bytes.",
        ),
    ]
    return [Frame(_draw_pair(tables, sums), _describe_pair(tables, sums, line), line) for tables, sums, line in told]


PLACES = {  # name -> its column and row among the tables, and how many cells it is wide; a product is under its factor
    "W1": (1, 0, 4), "W2": (2, 0, 3), "X": (0, 1, 4), "H": (1, 1, 4), "Y": (2, 1, 3),
    "dX": (0, 1, 4), "dH": (1, 1, 4), "dY": (2, 1, 3),
}  # fmt: skip
SHOWN = {"W1": "W1ᵀ", "W2": "W2ᵀ"}


def _draw_pair(tables: dict[str, Table], sums: list[tuple[str, Table]]) -> Figure:
    def paint(axes: Axes, top: float) -> None:
        backward = "dY" in tables
        for name, (column, row, columns) in PLACES.items():
            x, y = MARGIN + column * (4 * CELL + GAP), top + ROW + row * (4 * CELL + ROW + 10)
            if name in tables:
                _table(axes, x, y, SHOWN.get(name, name), tables[name])
            elif name.startswith("d") == backward and row:  # still to come
                put(axes, x, y - ROW, name, color=MUTED)
                box(axes, x, y, columns * CELL, 2 * CELL, "none", ec=MUTED, lw=0.8, ls=(0, (2, 2)))
        if _on_ranks(tables):
            _key(axes, MARGIN, top + ROW)
        y = top + 6 * CELL + 3 * ROW + 26
        for n, (name, table) in enumerate(sums):
            x = MARGIN + n * (4 * CELL + GAP)
            _table(axes, x, y, name, table)
            if n:
                put(axes, x - GAP / 2, y + CELL - 11, "+", "center", size=16, color=ACCENT, bold=True)

    body: Block = (8 * CELL + 3 * ROW + 28, paint)
    return page([body])


def _on_ranks(tables: dict[str, Table]) -> bool:
    """Return whether ranks hold these tables, and not one process all of them."""
    return any(table.owners != [BOTH] for table in tables.values())


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


def _describe_pair(tables: dict[str, Table], sums: list[tuple[str, Table]], line: str) -> str:
    told = [
        f"{SHOWN.get(name, name)} {_told(table) if _on_ranks(tables) else _rows(table)}"
        for name, table in [*tables.items(), *sums]
    ]
    return f"{line} {'; '.join(told)}."


def _rows(table: Table) -> str:
    return " / ".join(" ".join(f"{value:g}" for value in row) for row in table.values.tolist())


def _told(table: Table) -> str:
    rows = _rows(table)
    whose = {BOTH: "on both ranks", SUM: "the sum on both ranks", 0: "on TP 0", 1: "on TP 1"}
    if len(set(table.owners)) > 1:
        return f"{rows}, {'rows' if table.by_row else 'columns'} halved over TP 0 and TP 1"
    return f"{rows}, {whose[table.owners[0]]}"


# ---- A transformer block, cut by heads ----

LANE = (WIDTH - 2 * MARGIN - 12) / RANKS  # what a rank has of the card, with a gap between two
HEADS = 4  # of the block that is drawn, two on each rank
Lines = tuple[tuple[str, ...], ...]
BLOCK_CUT: Lines = (  # from top to bottom; several texts: a box for each head, then one a rank
    ("both", "residual stream x, [tokens, width]"),
    ("both", "norm 1"),
    ("heads", "Q K V", "softmax"),
    ("rank", "out: its heads' columns"),
    ("sent", "all-reduce, then add x"),
    ("both", "norm 2"),
    ("rank", "up: half of its rows; gelu"),
    ("rank", "down: half of its columns"),
    ("sent", "all-reduce, then add x"),
)
BY_TOKENS = {  # what sequence parallelism puts in the place of some of these lines
    "residual stream x, [tokens, width]": (("rank", "x: half of the tokens"),),
    "norm 1": (("rank", "norm 1"), ("sent", "all-gather of tokens")),
    "all-reduce, then add x": (("sent", "reduce-scatter by tokens"), ("rank", "add x")),
    "norm 2": (("rank", "norm 2"), ("sent", "all-gather of tokens")),
}
HIGH, BETWEEN = 26.0, 8.0  # of a box, and between two of them


def draw_heads(by_tokens: bool = False) -> Figure:
    """Return a transformer block from its input to its output, on two ranks side by side with two heads each.

    by_tokens: with sequence parallelism, where each rank has its tokens alone between the pairs of layers.
    """
    block = [new for line in BLOCK_CUT for new in (BY_TOKENS.get(line[1], (line,)) if by_tokens else (line,))]

    def paint(axes: Axes, top: float) -> None:
        for rank in range(RANKS):
            put(axes, MARGIN + rank * (LANE + 12) + LANE / 2, top, f"TP {rank}", "center", bold=True)
        y = top + ROW + 4
        for kind, *lines in block:
            if kind == "both":
                _bar(axes, MARGIN, y, WIDTH - 2 * MARGIN, lines[0])
            elif kind == "sent":
                box(axes, MARGIN, y, WIDTH - 2 * MARGIN, HIGH, ACCENT, gid="sent")
                put(axes, WIDTH / 2, y + HIGH / 2 - 7, lines[0], "center", color="#FFFFFF", bold=True)
            elif kind == "rank":
                for rank in range(RANKS):
                    _bar(axes, MARGIN + rank * (LANE + 12), y, LANE, lines[0], rank)
            else:
                y = _heads(axes, y, lines)
            y += HIGH + BETWEEN

    body: Block = (ROW + 4 + (len(block) + 2) * (HIGH + BETWEEN), paint)  # the heads take three rows
    white = "" if by_tokens else "White: whole on both ranks. "
    return card("", f"{white}Coloured: cut, a part on each rank. Red: the ranks send.", body)


def describe_heads(by_tokens: bool = False) -> str:
    """Return alt text for `draw_heads`."""
    heads = (
        "TP 0 has heads 0 and 1, and TP 1 has heads 2 and 3: their rows of query, key and value, their softmax, and "
        "the columns of the output projection that read them."
    )
    start = "A transformer block on two tensor-parallel ranks, from top to bottom."
    if by_tokens:
        return (
            f"{start[:-1]}, with sequence parallelism. Each rank holds half of the tokens of the residual stream and "
            f"of norm 1. An all-gather gives both all tokens. {heads} A reduce-scatter sums the two outputs, and each "
            "rank keeps its half of the tokens, adds x and applies norm 2. An all-gather again; each rank has half of "
            "the rows of up and half of the columns of down; a reduce-scatter again, and each rank adds x."
        )
    return (
        f"{start} Both ranks hold the residual stream and norm 1. {heads} An all-reduce sums the two outputs. Both "
        "ranks hold norm 2. Each has half of the rows of up and half of the columns of down. A second all-reduce sums."
    )


def _heads(axes: Axes, y: float, lines: Sequence[str]) -> float:
    """Draw a column of boxes for each head, its number on top; return where the last row of them begins."""
    each = (LANE - 8) / (HEADS // RANKS)
    for head in range(HEADS):
        rank, place = divmod(head, HEADS // RANKS)
        x = MARGIN + rank * (LANE + 12) + place * (each + 8)
        for n, line in enumerate((f"head {head}", *lines)):
            at = y + n * (HIGH + BETWEEN)
            if n == 0:
                put(axes, x + each / 2, at + HIGH - ROW + 4, line, "center", bold=True)
            else:
                _bar(axes, x, at, each, line, rank)
    return y + len(lines) * (HIGH + BETWEEN)


def _bar(axes: Axes, x: float, y: float, width: float, text: str, rank: int = BOTH) -> None:
    """Draw a box with a text, in a rank's hatch or white."""
    if rank == BOTH:
        box(axes, x, y, width, HIGH, "#FFFFFF", ec=MUTED, lw=0.8, gid="both")
    else:
        colour = dp_colour(0)
        box(axes, x, y, width, HIGH, colour, hatch=TP_HATCHES[rank], ec=hatch_on(colour), lw=0.8, gid=f"tp{rank}")
        plate = wide(text, bold=False) + 8
        box(axes, x + (width - plate) / 2, y + 4, plate, HIGH - 8, colour)
    put(axes, x + width / 2, y + HIGH / 2 - 7, text, "center")


# ---- Blocks orthogonalized alone ----
#
# Two rows of length 1 with an angle between them. Alone, each row is orthogonal as it stands. As a matrix they are
# turned apart until they are at right angles. Closed forms, so that every machine draws the same.

ANGLES = (5, 10, 60, 90)  # between the rows of two ranks, in degrees
HALF = (WIDTH - 2 * MARGIN) / 2
RADIUS, BAR = 104.0, 80.0  # of length 1, as an arrow and as a bar
Rows = tuple[tuple[float, float], tuple[float, float]]


def rows_at(angle: float) -> Rows:
    """Return two rows of length 1 with this angle between them, to either side of the diagonal."""
    half = radians(angle) / 2
    return (cos(radians(45) + half), sin(radians(45) + half)), (cos(radians(45) - half), sin(radians(45) - half))


def strengths(angle: float) -> tuple[float, float]:
    """Return the singular values of two rows of length 1 with this angle between them."""
    return sqrt(1 + cos(radians(angle))), sqrt(1 - cos(radians(angle)))


def frames_of_blocks() -> list[Frame]:
    """Return the update of two blocks and of the whole, for rows that turn away from each other, to right angles."""
    frames = []
    for angle in ANGLES:
        large, small = strengths(angle)
        line = f"If the rows of two ranks are {angle}° apart, "
        if angle == 90:
            line += "blocks give the same update as the whole matrix. Here a cut does no harm."
        else:
            line += f"blocks give singular values of {large:.2f} and {small:.2f}. The whole matrix gives 1 and 1."
        if angle == ANGLES[0]:
            line += " The direction that both rows share comes out at √2, and the other one almost vanishes."
        alt = f"{line} Arrows of the blocks' update stay {angle}° apart, those of the whole are at right angles."
        frames.append(Frame(_draw_blocks(angle), alt, line))
    return frames


def _draw_blocks(angle: float) -> Figure:
    def paint(axes: Axes, top: float) -> None:
        for n, (name, colour, apart) in enumerate((("each block alone", INK, angle), ("the whole", ACCENT, 90.0))):
            x = MARGIN + n * (HALF + 8)
            put(axes, x, top, name, bold=True, color=colour)
            _arrows(axes, (x + 12, top + ROW + 12 + RADIUS), rows_at(angle), rows_at(apart), colour)
            y = top + ROW + 30 + RADIUS
            for value in strengths(apart):
                box(axes, x, y, value * BAR, 14, colour, gid="strength")
                put(axes, x + HALF - 12, y, f"{value:.2f}", "right")
                y += 20
            axes.vlines(x + BAR, y - 43, y - 3, INK, lw=1, ls=(0, (2, 2)))
        put(axes, MARGIN, top + ROW + RADIUS + 78, "bars: singular values; dotted: 1, as Muon wants them", color=MUTED)

    body: Block = (2 * ROW + RADIUS + 80, paint)
    return card("", "thin: momentum, a row per rank; bold: its update", body)


def _arrows(axes: Axes, origin: tuple[float, float], before: Rows, after: Rows, colour: str) -> None:
    """Draw the rows of the momentum, thin, and of the update, in the quarter of the plane above `origin`."""
    x, y = origin
    axes.add_patch(Arc(origin, 2 * RADIUS, 2 * RADIUS, theta1=270, theta2=360, color=MUTED, lw=0.8, ls=(0, (2, 2))))
    axes.add_patch(Circle(origin, 2.5, fc=INK, lw=0))
    for rows, paint, line, head in ((after, colour, 3.0, 7), (before, MUTED, 1.2, 4)):
        for right, up in rows:
            end = (x + RADIUS * right, y - RADIUS * up)
            style = f"-|>,head_length={head},head_width={0.55 * head}"
            axes.add_patch(FancyArrowPatch(origin, end, arrowstyle=style, color=paint, lw=line, shrinkA=0, shrinkB=0))


# ---- The singular values of an update ----


def draw_update(momentum: Tensor) -> tuple[Figure, str]:
    """Draw the singular values of the update, whole and in blocks; return picture and alt text."""
    updates = {"whole": newton_schulz(momentum)}
    for T in (2, 4, 8):
        updates[f"{T} blocks"] = torch.cat([newton_schulz(block) for block in momentum.chunk(T, 0)])
    number = min(momentum.shape)
    share = [n / (number - 1) for n in range(number)]
    curves = {name: (share, singular_values(each).round(decimals=2).tolist()) for name, each in updates.items()}
    look = (curves, "share of the singular values", "singular value", "Singular values of the update")
    return draw_curves(*look), describe_curves(*look)
