"""One matrix on its way through a step, drawn twice: as one rank lives through the nine moves, and what all ranks hold.

`draw_step`: down the left side the matrix is put together, up the right side its update is taken apart; opposite moves
stand on the same level. `draw_held`: every rank of the grid after one move. Blocks and shards are true to scale; every
element has the colour of the DP rank and the hatch of the TP rank that it came from: its owner, or who computed it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.sharding.layout import Bucket, Layout, ParamSpec, Range
from distmuon.verify.prediction import predict_step
from muonbook.figures.style import INK, LEFT, MARGIN, MUTED, ROW, TITLE, TP_HATCHES, WIDTH, Block

from muonbook.figures.style import arrow, box, dp_colour, hatch_on, in_bytes, mix, page, put, text_block  # isort: skip

MOVES = (
    "reduce_scatter", "momentum", "dp_gather", "tp_gather", "newton_schulz",
    "tp_shard", "dp_shard", "apply", "all_gather",
)  # fmt: skip
HOLDS = {  # move -> (letter, what a rank holds after it: its TP-local "block", its flat "piece", the "whole" matrix)
    "gradients": ("G", "block"), "reduce_scatter": ("G", "piece"), "momentum": ("M", "piece"),
    "dp_gather": ("M", "block"), "tp_gather": ("M", "whole"), "newton_schulz": ("O", "whole"),
    "tp_shard": ("O", "block"), "dp_shard": ("O", "piece"), "apply": ("W", "piece"), "all_gather": ("W", "block"),
}  # fmt: skip
STORY = {
    "gradients": "Every rank has the gradient of its own data, for its TP block.",
    "reduce_scatter": "Owners of a part have the mean gradient of the piece that lies in their shard.",
    "momentum": "Momentum is elementwise: the same pieces.",
    "dp_gather": "Owners of a part have their whole TP block; the others keep nothing.",
    "tp_gather": "Owners of a part have the whole matrix, from all owners and all TP ranks.",
    "newton_schulz": "Owners of a part have all computed the whole update, each for itself.",
    "tp_shard": "Owners keep the block of their TP rank.",
    "dp_shard": "Owners keep the piece that lies in their shard.",
    "apply": "Every owner moves its own piece of the weights.",
    "all_gather": "Every rank has its TP block of the new weights, from all owners.",
}
ALL_HOLD, FROM_OWNERS = {"gradients", "all_gather"}, {"dp_gather", "tp_gather", "all_gather"}
WIDE, TALL, STRIP_WIDE, STRIP_HIGH = 140.0, 96.0, 176.0, 18.0  # of the largest matrix, of a bucket
LEVELS = (("gradients", "all_gather"), ("reduce_scatter", "apply"), ("momentum", "dp_shard"),
          ("dp_gather", "tp_shard"), ("tp_gather", "newton_schulz"))  # fmt: skip
ARROWS = (("reduce_scatter", "all_gather"), ("momentum", "apply"), ("dp_gather", "dp_shard"), ("tp_gather", "tp_shard"))
RECORDS = {  # move -> (collective, group, what the ledger says it is for)
    "reduce_scatter": ("reduce_scatter", "dp", "gradients, {bucket}"),
    "dp_gather": ("all_gather", "dp", "momentum, {bucket}"),
    "tp_gather": ("all_gather", "tp", "momentum, {name}"),
    "all_gather": ("all_gather", "dp", "parameters, {bucket}"),
}


# ---- The matrix -----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A rectangle of the whole matrix, in elements, and the rank that its values came from."""

    row: int
    column: int
    rows: int
    columns: int
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

    @property
    def size(self) -> str:
        """The whole shape, and how TP cuts it, in words."""
        rows, columns = self.whole
        cut = {0: ", rows cut over TP", 1: ", columns cut over TP", None: ""}[self.spec.tp_split_dim]
        return f"{rows:,} × {columns:,}{cut if self.tp > 1 else ''}"

    def piece(self, dp_rank: int) -> Range:
        """What `dp_rank` owns of the TP-local matrix, counted from its first element."""
        return self.layout.meta(self.bucket, self.index, dp_rank).range_in_param

    def held(self, move: str, dp_rank: int, tp_rank: int) -> list[Part]:
        """Return what a rank holds after `move`."""
        if move not in ALL_HOLD and dp_rank not in self.owners:
            return []
        where, everything = HOLDS[move][1], Range(0, self.spec.numel)
        cut = self.spec.tp_split_dim is not None
        parts = []
        for t in range(self.tp) if where == "whole" and cut else [tp_rank]:
            for r in self.owners if move in FROM_OWNERS else [dp_rank]:
                run = self.piece(r) if move in FROM_OWNERS or where == "piece" else everything
                parts += self._place(run, r, t if move in FROM_OWNERS else tp_rank, t)
        return parts

    def _place(self, run: Range, dp_rank: int, source: int, block: int) -> list[Part]:
        """Return a run of TP block `block`, which came from (dp_rank, source), as rectangles of the whole matrix."""
        rows, columns = self.spec.shape
        down, right = ((block * rows, 0), (0, block * columns), (0, 0))[{0: 0, 1: 1, None: 2}[self.spec.tp_split_dim]]
        return [Part(r + down, c + right, h, w, dp_rank, source) for r, c, h, w in rectangles(run, columns)]

    def mark(self, move: str) -> str:
        """Return what is held after `move` in the notation of book/notation.md."""
        letter, where = HOLDS[move]
        if where == "piece":
            return f"{letter}[N_dp]"
        cut = self.spec.tp_split_dim if where == "block" else None
        rows, columns = (sign + "_tp" * (dim == cut) for dim, sign in enumerate("IJ"))
        return f"{letter}[{rows}, {columns}]" + "{U_dp}" * (move == "gradients")


def rectangles(run: Range, columns: int) -> list[tuple[int, int, int, int]]:
    """Return a run of a row-major matrix as (row, column, rows, columns): a row's end, whole rows, a beginning."""
    found = []
    start = run.start
    while start < run.end:
        row, column = divmod(start, columns)
        rows = max((run.end - start) // columns, 1) if column == 0 else 1
        width = min(columns - column, run.end - start)
        found.append((row, column, rows, width))
        start += rows * width
    return found


def paint_matrix(
    axes: Axes, x: float, y: float, matrix: CutMatrix, parts: list[Part], scale: float, ident: str
) -> None:
    """Draw the outline of the whole matrix at `scale` points per element, its TP cuts, and these parts in it."""
    rows, columns = matrix.whole
    box(axes, x, y, columns * scale, rows * scale, "none", ec=MUTED, lw=0.7, ls=(0, (2, 2)), gid=f"{ident}-whole")
    for part in parts:
        colour = dp_colour(part.dp)
        at = (x + part.column * scale, y + part.row * scale, part.columns * scale, part.rows * scale)
        gid, hatch = f"{ident}-from-dp{part.dp}-tp{part.tp}", TP_HATCHES[part.tp % 8]
        box(axes, *at, colour, ec=hatch_on(colour), hatch=hatch, gid=gid)


def rank_key(dp_ranks: Iterable[int], tp: int) -> Block:
    """Return what the colours of these DP ranks and the hatches of T = `tp` TP ranks look like, eight in a line."""
    looks = [(f"DP {r}", dp_colour(r), "") for r in dp_ranks]
    lines = [looks[n : n + 8] for n in range(0, len(looks), 8)]
    hatches = [(f"TP {t}", "none", TP_HATCHES[t % 8]) for t in range(min(tp, 8))]
    if tp > 1 and len(lines[-1]) + len(hatches) <= 8:
        lines[-1] += hatches
    elif tp > 1:
        lines.append(hatches)

    def paint(axes: Axes, top: float) -> None:
        for row, line in enumerate(lines):
            for n, (name, colour, hatch) in enumerate(line):
                x, y = MARGIN + 50 * n, top + 6 + ROW * row
                edge = {"ec": MUTED, "lw": 0.7} if colour == "none" else {}
                box(axes, x, y + 1, 11, 10, colour, hatch=hatch, gid=f"key-{name}", **edge)
                put(axes, x + 15, y, name, color=MUTED)

    return 8 + ROW * len(lines), paint


# ---- What every rank holds after one move ---------------------------------------------------------------------


def draw_held(layout: Layout, name: str, tp: int, move: str) -> Figure:
    """Draw, for every rank of the grid, what it holds of matrix `name` after `move`.

    move: one of MOVES, or "gradients" for before the first. Moves are those of the strategy gather_all.
    Raises ValueError for another move, a grid larger than 8 × 4, and what is not a matrix of this layout.
    """
    matrix = _checked(layout, name, tp, move)
    rows, columns = matrix.whole
    room = (WIDTH - LEFT - MARGIN) / tp
    scale = min((room - 12) / columns, (74 if columns >= rows else 96) / rows)
    width, pitch = columns * scale, rows * scale + 12
    across = min(room, width + 56)

    def paint(axes: Axes, top: float) -> None:
        for t in range(tp):
            put(axes, LEFT + t * across + (across - 12) / 2, top + 4, f"TP {t}", "center")
        for r in range(layout.dp):
            y = top + 4 + ROW + 6 + r * pitch
            put(axes, MARGIN, y + rows * scale / 2 - 6, f"DP {r}")
            for t in range(tp):
                x = LEFT + t * across + (across - 12 - width) / 2
                paint_matrix(axes, x, y, matrix, matrix.held(move, r, t), scale, f"held-dp{r}-tp{t}")

    panels: Block = (4 + ROW + 6 + layout.dp * pitch, paint)
    size = f"{matrix.mark(move)} of {matrix.size}"
    sources = sorted({part.dp for r in range(layout.dp) for part in matrix.held(move, r, 0)})
    title = f"{name} after {move}" if move in MOVES else f"{name} before the first move"
    return page([text_block(title, TITLE), text_block(size), text_block(STORY[move]), panels, rank_key(sources, tp)])


def describe_held(layout: Layout, name: str, tp: int, move: str) -> str:
    """Return alt text for `draw_held`: how many elements every rank holds, and from whom."""
    matrix = _checked(layout, name, tp, move)
    told = []
    for r in range(layout.dp):
        parts = matrix.held(move, r, 0)
        sources = ", ".join(str(dp) for dp in sorted({part.dp for part in parts}))
        size = sum(part.rows * part.columns for part in parts)
        told.append(f"DP {r} {f'{size:,} elements from DP {sources}' if parts else 'nothing'}")
    rows, columns = matrix.whole
    when = f"after {move}" if move in MOVES else "before the first move"
    return (
        f"{name}, {rows:,} × {columns:,}, {when}, on {layout.dp} DP × {tp} TP ranks. Each TP rank of {'; '.join(told)}."
    )


def _checked(layout: Layout, name: str, tp: int, move: str) -> CutMatrix:
    if move not in HOLDS:
        raise ValueError(f"move is {move!r}; it must be gradients or one of {', '.join(MOVES)}.")
    if layout.dp > 8 or tp > 4:
        raise ValueError(f"{layout.dp} DP × {tp} TP panels do not fit; a page has room for 8 × 4.")
    return CutMatrix.find(layout, name, tp)


# ---- All moves, as seen by one rank ---------------------------------------------------------------------------


def draw_step(
    layout: Layout, name: str, tp: int, dp_rank: int | None = None, tp_rank: int = 0, gather_dtype: str | None = None
) -> Figure:
    """Draw the nine moves for matrix `name`, as one rank lives through them, under the strategy gather_all.

    layout: the map; its `dp` is D. tp: T. dp_rank: by default the first that owns a part. gather_dtype: by name, as for
    DistributedMuon. Bytes are those that `predict_step` says this rank sends.
    Raises ValueError for what is not a matrix of this layout, and for a rank off the grid or without a part of it.
    """
    step = _Step(layout, name, tp, dp_rank, tp_rank, gather_dtype)
    bucket = f"{step.matrix.bucket.padded:,} elements"
    blocks = [
        text_block(f"The nine moves: {name}", TITLE),
        text_block(f"{step.matrix.size}, in a bucket of {bucket}; as seen by {step.who}"),
        *step.blocks(),
        rank_key(step.matrix.owners, tp),
        text_block("Strips: the bucket, a bracket over this matrix; pale: the rest of this rank's shard."),
        text_block("Bytes: sent by this rank, for the whole bucket over DP, for this matrix over TP."),
    ]
    return page(blocks)


def describe_step(
    layout: Layout, name: str, tp: int, dp_rank: int | None = None, tp_rank: int = 0, gather_dtype: str | None = None
) -> str:
    """Return alt text for `draw_step`: what every move leaves and sends."""
    step = _Step(layout, name, tp, dp_rank, tp_rank, gather_dtype)
    moves = "; ".join(
        f"{move} leaves {step.matrix.mark(move)}, {step.size(move)}, sends {step.sent(move)}" for move in MOVES
    )
    return f"The nine moves of a step around Newton–Schulz for {name}, as seen by {step.who}: {moves}."


class _Step:
    """The picture of one matrix and one rank; arguments and errors as for `draw_step`."""

    def __init__(
        self, layout: Layout, name: str, tp: int, dp_rank: int | None, tp_rank: int, gather_dtype: str | None
    ) -> None:
        self.matrix = CutMatrix.find(layout, name, tp)
        self.dp = self.matrix.owners[0] if dp_rank is None else dp_rank
        self.tp = tp_rank
        if self.dp not in self.matrix.owners or not 0 <= tp_rank < tp:
            owners = ", ".join(map(str, self.matrix.owners))
            raise ValueError(f"DP {self.dp}, TP {tp_rank} owns nothing of {name}; TP 0 to {tp - 1} of DP {owners} do.")
        self.who = f"DP {self.dp}, TP {self.tp} of {layout.dp} DP × {tp} TP"
        self.ledger = predict_step(layout, tp, self.dp, [self.matrix.index], gather_dtype=gather_dtype)
        rows, columns = self.matrix.whole
        self.scale = min(WIDE / columns, TALL / rows)

    def sent(self, move: str) -> str:
        """Return what this rank sends for a move, in words."""
        if move not in RECORDS:
            return "nothing"
        op, group, label = RECORDS[move]
        label = label.format(bucket=self.matrix.bucket.label, name=self.matrix.spec.name)
        sent = self.ledger.total(op=op, group=group, label=label).sent_bytes
        return in_bytes(sent) if sent else "nothing"

    def size(self, move: str) -> str:
        """Return the size of what is held after a move, in words."""
        parts = self.matrix.held(move, self.dp, self.tp)
        if "N_dp" in self.matrix.mark(move):
            return f"{sum(part.rows * part.columns for part in parts):,} of {self.matrix.spec.numel:,} elements"
        rows, columns = self.matrix.whole if move in ("tp_gather", "newton_schulz") else self.matrix.spec.shape
        return f"{rows:,} × {columns:,}"

    def blocks(self) -> list[Block]:
        """Return levels and, between them, arrows; everything in left and right mirrors."""
        found: list[Block] = []
        for n, (left, right) in enumerate(LEVELS):
            found.append(self._level(left, right))
            if n < len(ARROWS):
                found.append(self._arrows(*ARROWS[n]))
        return found

    def _level(self, left: str, right: str) -> Block:
        rows, columns = self.matrix.whole
        flat = "N_dp" in self.matrix.mark(left)
        high = STRIP_HIGH + 8 if flat else rows * self.scale
        wide = STRIP_WIDE if flat else columns * self.scale

        def paint(axes: Axes, top: float) -> None:
            for move, side in ((left, "left"), (right, "right")):
                edge = MARGIN if side == "left" else WIDTH - MARGIN
                put(axes, edge, top + 5, self.matrix.mark(move), side, True)
                put(axes, edge, top + 5 + ROW, self.size(move), side, color=MUTED)
                x, y = (edge if side == "left" else edge - wide), top + 2 * ROW + 9
                if flat:
                    self._strip(axes, x, y + 8, move)
                else:
                    parts = self.matrix.held(move, self.dp, self.tp)
                    paint_matrix(axes, x, y, self.matrix, parts, self.scale, f"step-{move}")
            if right == "newton_schulz":
                y = top + 2 * ROW + 9 + high / 2
                arrow(axes, (MARGIN + wide + 8, y), (WIDTH - MARGIN - wide - 8, y))
                put(axes, WIDTH / 2, y - 19, right, "center", True)

        return 2 * ROW + 9 + high + 5, paint

    def _strip(self, axes: Axes, x: float, y: float, move: str) -> None:
        """Draw the bucket: this rank's shard, the part of it that is in this matrix, and a bracket over the matrix."""
        bucket, scale = self.matrix.bucket, STRIP_WIDE / self.matrix.bucket.padded
        colour = dp_colour(self.dp)
        shard = bucket.shard(self.dp).relative_to(bucket.offset)
        where = self.matrix.layout.global_ranges[self.matrix.index].relative_to(bucket.offset)
        piece = where.intersect(shard)
        box(axes, x + shard.start * scale, y, shard.size * scale, STRIP_HIGH, mix(colour, "#FFFFFF", 0.65))
        looks = {"ec": hatch_on(colour), "hatch": TP_HATCHES[self.tp % 8], "gid": f"step-{move}-piece"}
        box(axes, x + piece.start * scale, y, max(piece.size * scale, 0.8), STRIP_HIGH, colour, **looks)
        box(axes, x, y, STRIP_WIDE, STRIP_HIGH, "none", ec=MUTED, lw=0.7, ls=(0, (2, 2)))
        a, b = x + where.start * scale + 0.8, x + where.end * scale - 0.8
        axes.plot([a, a, b, b], [y - 2, y - 6, y - 6, y - 2], color=INK, lw=1.8, solid_joinstyle="miter")

    def _arrows(self, down: str, up: str) -> Block:
        def paint(axes: Axes, top: float) -> None:
            for move, side, edge in ((down, "left", MARGIN + 10), (up, "right", WIDTH - MARGIN - 10)):
                ends = ((edge, top + 3), (edge, top + 39))
                arrow(axes, *(ends if side == "left" else ends[::-1]))
                x = edge + 14 * (1 if side == "left" else -1)
                note = "elementwise" if move in ("momentum", "apply") else f"sends {self.sent(move)}"
                put(axes, x, top + 5, move, side, True)
                put(axes, x, top + 5 + ROW, note, side, color=MUTED)
            axes.hlines(top + 21, MARGIN + 136, WIDTH - MARGIN - 116, MUTED, lw=0.8, ls=(0, (1, 3)))

        return 42.0, paint
