"""The nine moves of a step: one matrix as all ranks of a grid hold it, move by move, and where a chapter stands.

`frames_of_step`: every rank's panel is an outline of the whole matrix with what this rank holds painted in it. Every
element has the colour of the DP rank and the hatch of the TP rank that it came from: its owner, or who computed it.
`draw_strip`: the moves by name, in two rows that mirror each other around Newton–Schulz.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Polygon

from distmuon.sharding.layout import Bucket, Layout, ParamSpec, Range, plan
from distmuon.verify.prediction import predict_step
from muonbook.figures.player import Frame
from muonbook.figures.style import CARD, INK, MARGIN, MUTED, ROW, TP_HATCHES, WIDTH, Block

from muonbook.figures.style import arrow, box, dp_colour, hatch_on, in_bytes, mix, page, put, text_block, wide  # isort: skip

GATHERING = ("reduce_scatter", "momentum", "dp_gather", "tp_gather")  # each above the move that mirrors it
SHARDING = ("all_gather", "apply", "dp_shard", "tp_shard")
MOVES = (*GATHERING, "newton_schulz", *reversed(SHARDING))


class Holding(NamedTuple):
    """What a rank has after a move."""

    letter: str  # of book/notation.md
    where: str  # its flat "piece", its TP-local "block", or the "whole" matrix
    held: str  # in words
    done: str  # what has happened
    sent: str = ""  # op, group and label of the move's record in the ledger


HOLDINGS = {
    "gradients": Holding(
        "G", "block", "its own gradient",
        "{ranks} processes train one matrix. Coloured is what each of them has of its gradient, computed from its part "
        "of the batch. Muon needs the mean of these gradients, and it needs it for the whole matrix",
    ),
    "reduce_scatter": Holding(
        "G", "piece", "its piece of the mean gradient",
        "The DP ranks add up their gradients, and each rank keeps the piece of the sum that it owns",
        "reduce_scatter dp gradients, {bucket}",
    ),
    "momentum": Holding(
        "M", "piece", "its piece of the momentum",
        "Each rank adds its piece to its momentum, element by element, so no rank needs the whole matrix yet",
    ),
    "dp_gather": Holding(
        "M", "block", "its TP block of the momentum",
        "The DP ranks exchange their pieces in {wire}, so that each has all of its TP block",
        "all_gather dp momentum, {bucket}",
    ),
    "tp_gather": Holding(
        "M", "whole", "all of the momentum", "The TP ranks exchange their blocks, and now each has the whole matrix",
        "all_gather tp momentum, {name}",
    ),
    "newton_schulz": Holding(
        "O", "whole", "all of the update",
        "Each rank that owns a piece orthogonalizes the whole matrix, so this work is done {times} times",
    ),
    "tp_shard": Holding("O", "block", "its TP block of the update", "Each rank keeps the block of its TP rank"),
    "dp_shard": Holding("O", "piece", "its piece of the update", "Each rank keeps the piece that it owns"),
    "apply": Holding(
        "W", "piece", "its piece of the new weights", "Each rank moves its piece of the weights by its update"
    ),
    "all_gather": Holding(
        "W", "block", "its TP block of the new weights",
        "The DP ranks exchange their new weights, so that all of them are ready for the next batch",
        "all_gather dp parameters, {bucket}",
    ),
}  # fmt: skip
ALL_HOLD, FROM_OWNERS = {"gradients", "all_gather"}, {"dp_gather", "tp_gather", "all_gather"}


# ---- The matrix -----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A run of the flat TP block `block`, and the rank that its values came from."""

    run: Range
    block: int
    dp: int
    tp: int


@dataclass(frozen=True)
class CutMatrix:
    """One parameter of a layout as a whole matrix [I, J], on a grid with T = `tp`."""

    layout: Layout
    index: int
    tp: int

    @classmethod
    def find(cls, layout: Layout, name: str, tp: int) -> CutMatrix:
        """Raises ValueError if `name` is not a matrix of this layout."""
        found = [i for i, spec in enumerate(layout.specs) if spec.name == name and len(spec.shape) == 2 and spec.numel]
        if not found or tp < 1:
            names = ", ".join(spec.name for spec in layout.specs if len(spec.shape) == 2)
            raise ValueError(f"no matrix {name!r} on {tp} TP ranks in this layout; its matrices are {names or 'none'}.")
        return cls(layout, found[0], tp)

    @property
    def spec(self) -> ParamSpec:
        return self.layout.specs[self.index]

    @cached_property
    def bucket(self) -> Bucket:
        return next(bucket for bucket in self.layout.buckets if self.index in bucket.params)

    @property
    def owners(self) -> range:
        return self.layout.owners(self.bucket, self.index)

    @property
    def whole(self) -> tuple[int, int]:
        rows, columns = self.spec.full_shape(self.tp)
        return rows, columns

    def held(self, move: str, dp_rank: int, tp_rank: int) -> list[Part]:
        """Return what a rank holds after `move`."""
        if move not in ALL_HOLD and dp_rank not in self.owners:
            return []
        where, everything = HOLDINGS[move].where, Range(0, self.spec.numel)
        cut = self.spec.tp_split_dim is not None
        parts = []
        for block in range(self.tp) if where == "whole" and cut else [tp_rank]:
            for dp in self.owners if move in FROM_OWNERS else [dp_rank]:
                apart = move in FROM_OWNERS or where == "piece"
                run = self.layout.meta(self.bucket, self.index, dp).range_in_param if apart else everything
                parts.append(Part(run, block, dp, block if move in FROM_OWNERS else tp_rank))
        return parts

    def spare(self, move: str, dp_rank: int, tp_rank: int) -> list[Part]:
        """Return what a rank receives in `move` without needing it, because the message is one for the whole bucket."""
        if move != "dp_gather" or dp_rank in self.owners:
            return []
        return self.held(move, self.owners[0], tp_rank)

    @property
    def in_one_message(self) -> int:
        """Return how many matrices the bucket has: those that travel in the same messages over DP."""
        return sum(len(self.layout.specs[i].shape) == 2 for i in self.bucket.params)

    def outline(self, part: Part) -> list[tuple[int, int]]:
        """Return the corners (column, row) of a part in the whole matrix: a run of a row-major block is a staircase."""
        rows, columns = self.spec.shape
        down = part.block * rows if self.spec.tp_split_dim == 0 else 0
        right = part.block * columns if self.spec.tp_split_dim == 1 else 0
        (top, first), (bottom, last) = divmod(part.run.start, columns), divmod(part.run.end, columns)
        if top == bottom:
            corners = [(first, top), (last, top), (last, top + 1), (first, top + 1)]
        else:
            corners = [(first, top), (columns, top), (columns, bottom)]
            corners += [(last, bottom), (last, bottom + 1), (0, bottom + 1)] if last else [(0, bottom)]
            corners += [(0, top + 1), (first, top + 1)] if first else []
        return [(x + right, y + down) for x, y in corners]

    def mark(self, move: str) -> str:
        """Return what is held after `move` in the notation of book/notation.md."""
        letter, where = HOLDINGS[move][:2]
        if where == "piece":
            return f"{letter}[N_dp]"
        cut = self.spec.tp_split_dim if where == "block" else None
        rows, columns = (sign + "_tp" * (dim == cut) for dim, sign in enumerate("IJ"))
        return f"{letter}[{rows}, {columns}]" + "{U_dp}" * (move == "gradients")

    def sent(self, move: str, dp_rank: int) -> int:
        """Return the bytes that a rank sends in this move: for the whole bucket over DP, for this matrix over TP."""
        if not HOLDINGS[move].sent:
            return 0
        op, group, label = HOLDINGS[move].sent.split(maxsplit=2)
        label = label.format(bucket=self.bucket.label, name=self.spec.name)
        step = predict_step(self.layout, self.tp, dp_rank, [self.index])
        return step.total(op=op, group=group, label=label).sent_bytes


def small_layer_layout() -> Layout:
    """Return the map of one small layer for 4 DP ranks; its weight [8, 16] is cut over 2 TP ranks along dimension 1."""
    return plan([ParamSpec("weight", (8, 8), "float32", 1), ParamSpec("bias", (8,), "float32")], dp=4)


# ---- The step, moving -----------------------------------------------------------------------------------------


MOST_DP, MOST_TP = 8, 4  # panels that a card has room for
NAMES = {move: move for move in MOVES} | {"reduce_scatter": "reduce_\nscatter", "newton_schulz": "newton_\nschulz"}
WIDTHS = (60.0, 70.0, 63.0, 61.0, 53.0)  # of the strip's columns; the last is Newton–Schulz's
ROW_ROOM, COLUMN_ROOM = 44, 48  # left of the panels, without their lane; for a column's name, with its hatch
LANE, GAP, TALL = 24.0, 14.0, 66.0  # left of a panel, below it, the most that it is high
EXCHANGE = (5.0, 3.0)  # the heads of an arrow that points both ways
PALE = 0.75  # how much lighter a part is that a rank has received and does not need


def frames_of_step(layout: Layout, name: str, tp: int, marks: bool = True) -> list[Frame]:
    """Return the step of matrix `name` as frames: the gradients, then what every rank holds after each move.

    Moves are those of the strategy gather_all; bytes are those that `predict_step` says a rank sends. marks: whether
    what is held is also said in the notation of book/notation.md.
    Raises ValueError for a grid larger than 8 × 4, and for what is not a matrix of this layout.
    """
    if layout.dp > MOST_DP or tp > MOST_TP:
        raise ValueError(f"{layout.dp} DP × {tp} TP panels do not fit; a card has room for {MOST_DP} × {MOST_TP}.")
    matrix = CutMatrix.find(layout, name, tp)
    return [
        Frame(page(_moment(matrix, move, marks)), _describe_moment(matrix, move), _caption(matrix, move))
        for move in HOLDINGS
    ]


def _caption(matrix: CutMatrix, move: str) -> str:
    wire = "float64" if matrix.spec.dtype == "float64" else "bf16"  # DistributedMuon's gather_dtype, if none is given
    ranks = matrix.layout.dp * matrix.tp
    done = HOLDINGS[move].done.format(times=len(matrix.owners) * matrix.tp, wire=wire, ranks=ranks)
    if move not in MOVES:
        others = [matrix.layout.specs[i] for i in matrix.bucket.params if i != matrix.index]
        names, size = ", ".join(spec.name for spec in others), sum(spec.numel for spec in others)
        also = (
            f" The same bucket holds {names}, {size:,} elements, which we do not draw."
            if others and matrix.in_one_message == 1
            else ""
        )
        return f"Before the step: {done}.{also}"
    sent = sorted({matrix.sent(move, r) for r in matrix.owners})
    sends = "Nothing is sent" if sent == [0] else f"Each sends {' to '.join(map(in_bytes, sent))}"
    if matrix.in_one_message > 1 and " dp " in HOLDINGS[move].sent:
        sends += f", of all {matrix.in_one_message} matrices in one message"
    return f"{MOVES.index(move) + 1}. {move}: {done}. {sends}."


def _moment(matrix: CutMatrix, move: str, marks: bool) -> list[Block]:
    """Return the strip with `move` highlighted, and every rank after it, with arrows for what has just travelled."""
    rows, columns = matrix.whole
    left = MARGIN + ROW_ROOM
    pitch = (WIDTH - MARGIN - left) / matrix.tp
    scale = min((pitch - LANE) / columns, TALL / rows)
    width, height = columns * scale, rows * scale
    op, group = HOLDINGS[move].sent.split()[:2] if matrix.sent(move, matrix.owners[0]) else ("", "")

    def paint(axes: Axes, top: float) -> None:
        top += 8
        put(axes, MARGIN, top, f"each holds {HOLDINGS[move].held}")
        if marks:
            put(axes, WIDTH - MARGIN, top, matrix.mark(move), "right", True)
        for t in range(matrix.tp):
            x = left + t * pitch + LANE
            middle = x + width / 2
            _chip(axes, middle - COLUMN_ROOM / 2, top + ROW + 5, "none", f"TP {t}", TP_HATCHES[t])
            y = top + 2 * ROW + 12
            if group == "dp":
                levels = [y + r * (height + GAP) + height / 2 for r in range(matrix.layout.dp)]
                _bus(axes, x - LANE + 4, x - 1, levels, op == "reduce_scatter")
            for r in range(matrix.layout.dp):
                spare = matrix.spare(move, r, t)
                paint_matrix(axes, x, y, matrix, spare or matrix.held(move, r, t), scale, pale=bool(spare))
                if t == 0:
                    _chip(axes, MARGIN, y + height / 2 - 6, dp_colour(r), f"DP {r}")
                elif group == "tp" and r in matrix.owners:
                    ends = (x - LANE + 2, y + height / 2), (x - 2, y + height / 2)
                    arrow(axes, *ends, both=True, head=EXCHANGE)
                y += height + GAP

    panels: Block = (2 * ROW + 20 + matrix.layout.dp * (height + GAP) - GAP, paint)
    return [_strip({move}), panels]


def _chip(axes: Axes, x: float, y: float, colour: str, name: str, hatch: str = "") -> None:
    box(axes, x, y + 2, 10, 10, colour, hatch=hatch, ec=MUTED, lw=0.7 * (colour == "none"))
    put(axes, x + 14, y, name)


def paint_matrix(
    axes: Axes, x: float, y: float, matrix: CutMatrix, parts: list[Part], scale: float, pale: bool
) -> None:
    """Draw the outline of the whole matrix at `scale` points per element, its TP cuts, and these parts in it.

    pale: the parts have been received, and are not needed.
    """
    rows, columns = matrix.whole
    width, height = columns * scale, rows * scale
    box(axes, x, y, width, height, "#FFFFFF", ec=MUTED, lw=0.8, ls=(0, (2, 2)), gid="whole")
    for n in range(1, matrix.tp if matrix.spec.tp_split_dim is not None else 1):
        across, down = (n * width / matrix.tp, 0.0) if matrix.spec.tp_split_dim else (0.0, n * height / matrix.tp)
        ends = ([x + across, x + (across or width)], [y + down, y + (down or height)])
        axes.plot(*ends, color=MUTED, lw=0.8, ls=(0, (2, 2)))
    for part in parts:
        colour = mix(dp_colour(part.dp), CARD, PALE * pale)
        corners = [(x + column * scale, y + row * scale) for column, row in matrix.outline(part)]
        looks = {"fc": colour, "ec": hatch_on(colour), "lw": 0.8, "hatch": TP_HATCHES[part.tp] * (not pale)}
        gid = f"{'spare' if pale else 'from'}-dp{part.dp}-tp{part.tp}"
        axes.add_patch(Polygon(corners, closed=True, gid=gid, **looks))
    if pale or not parts:
        words = ("not needed here", "–") if pale else ("nothing of it", "–")
        text = next(text for text in words if wide(text) <= width or len(text) == 1)
        put(axes, x + width / 2, y + height / 2 - 7, text, "center", color=INK if pale else MUTED)


def _bus(axes: Axes, x: float, end: float, levels: list[float], is_sum: bool) -> None:
    """Draw a line along a column of panels, with an arrow from and to each, and a plus on it where it adds."""
    axes.vlines(x, levels[0], levels[-1], INK, lw=1.6)
    for y in levels:
        arrow(axes, (x, y), (end, y), both=True, head=EXCHANGE)
    if is_sum:
        y = (levels[0] + levels[-1]) / 2
        axes.add_patch(Circle((x, y), 7, fc=CARD, ec=INK, lw=1.2))
        axes.plot([x - 4, x + 4], [y, y], [x, x], [y - 4, y + 4], color=INK, lw=1.4)


def _describe_moment(matrix: CutMatrix, move: str) -> str:
    """Return alt text for one frame: what every rank holds, how many elements, and from whom."""
    told = []
    for r in range(matrix.layout.dp):
        spare = matrix.spare(move, r, 0)
        parts = spare or matrix.held(move, r, 0)
        sources = ", ".join(str(dp) for dp in sorted({part.dp for part in parts}))
        size = sum(part.run.size for part in parts)
        what = f"{size:,} elements from DP {sources}" if parts else "nothing"
        told.append(f"DP {r} {what}{', which it does not need' * bool(spare)}")
    rows, columns = matrix.whole
    when = f"After {move}" if move in MOVES else "Before the first move"
    grid = f"{matrix.layout.dp} DP × {matrix.tp} TP ranks"
    return (
        f"{when}, {matrix.spec.name}, {rows:,} × {columns:,}, on {grid}. Each holds {HOLDINGS[move].held}: "
        f"each TP rank of {'; '.join(told)}."
    )


# ---- Where a chapter stands -----------------------------------------------------------------------------------


UPPER, LOWER, LINE = 32.0, 20.0, 13.0  # how high the rows are, and a line of a name


def draw_strip(here: set[str]) -> Figure:
    """Draw the nine moves with those in `here` highlighted: where a chapter is.

    Raises ValueError for what is not a move.
    """
    _check(here)
    return page([text_block("You are here, among the nine moves of a step:"), (4.0, lambda *_: None), _strip(here)])


def describe_strip(here: set[str]) -> str:
    """Return alt text for `draw_strip`."""
    _check(here)
    names = ", ".join(move for move in MOVES if move in here)
    return (
        f"The nine moves of a step, {', '.join(MOVES)}, in two rows: those that gather and, under each, its mirror "
        f"image. You are here: {names}."
    )


def _check(here: set[str]) -> None:
    if not here or not here <= set(MOVES):
        raise ValueError(f"here is {sorted(here)}; it must be some of {', '.join(MOVES)}.")


def _strip(here: set[str]) -> Block:
    """Return the moves by name: gathering to the right, and back to the left under it."""
    gap = (WIDTH - 2 * MARGIN - sum(WIDTHS)) / (len(WIDTHS) - 1)
    lefts = [MARGIN + sum(WIDTHS[:n]) + n * gap for n in range(len(WIDTHS))]

    def paint(axes: Axes, top: float) -> None:
        low = top + UPPER + 5
        for n, (move, mirror) in enumerate(zip(GATHERING, SHARDING, strict=True)):
            name(axes, move, lefts[n], top, WIDTHS[n], UPPER)
            name(axes, mirror, lefts[n], low, WIDTHS[n], LOWER)
            between = (lefts[n] + WIDTHS[n], lefts[n + 1])
            head(axes, between, top + UPPER / 2)
            head(axes, between[::-1], low + LOWER / 2)
        name(axes, "newton_schulz", lefts[-1], top, WIDTHS[-1], UPPER + 5 + LOWER)

    def name(axes: Axes, move: str, x: float, y: float, width: float, height: float) -> None:
        fill, ink = (INK, "#FFFFFF") if move in here else (mix(CARD, MUTED, 0.1), INK)
        gid = f"move-{move}" + "-here" * (move in here)
        shape = "round,pad=0,rounding_size=5"
        axes.add_patch(FancyBboxPatch((x, y), width, height, shape, fc=fill, ec="none", gid=gid))
        lines = NAMES[move].splitlines()
        for n, line in enumerate(lines):
            put(axes, x + width / 2, y + height / 2 - LINE * len(lines) / 2 + LINE * n, line, "center", color=ink)

    def head(axes: Axes, ends: tuple[float, float], y: float) -> None:
        (a, b), up = ends, 3.0
        axes.add_patch(Polygon([(a, y - up), (a, y + up), (b, y)], closed=True, fc=MUTED, ec="none"))

    return UPPER + 5 + LOWER, paint
