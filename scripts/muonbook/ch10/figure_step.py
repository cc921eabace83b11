"""One matrix on its way through a step: the nine moves as a U around Newton–Schulz, as one rank lives through them.

Down the left side the matrix is put together, up the right side its update is taken apart; opposite moves stand on the
same level. Blocks and shards are true to scale, each in the colour and hatch of the rank they came from.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from muonbook.ch10.figure_holdings import MOVES, Matrix, describe_holdings, draw_holdings, paint_matrix, rank_key
from muonbook.figures.style import INK, MARGIN, MUTED, ROW, TITLE, TP_HATCHES, WIDTH, Block

from muonbook.figures.style import box, dp_colour, in_bytes, ink_on, mix, page, put, text_block  # isort: skip
from distmuon.sharding.layout import Layout
from distmuon.verify.prediction import predict_step

__all__ = ["MOVES", "describe_holdings", "describe_step", "draw_holdings", "draw_step"]

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


def draw_step(
    layout: Layout, name: str, tp: int, dp_rank: int | None = None, tp_rank: int = 0, gather_dtype: str | None = None
) -> Figure:
    """Draw the nine moves for matrix `name`, as one rank lives through them, under the strategy gather_all.

    layout: the map; its `dp` is D. tp: T. dp_rank: by default the first that owns a part. gather_dtype: by name, as for
    DistributedMuon. Bytes are those that `predict_step` says this rank sends.
    Raises ValueError for what is not a matrix of this layout, and for a rank off the grid or without a part of it.
    """
    step = _Step(layout, name, tp, dp_rank, tp_rank, gather_dtype)
    rows, columns = step.matrix.whole
    cut = {0: ", rows cut over TP", 1: ", columns cut over TP", None: ""}[step.matrix.spec.tp_split_dim]
    bucket = f"{step.matrix.bucket.padded:,} elements"
    blocks = [
        text_block(f"The nine moves: {name}", TITLE),
        text_block(f"{rows:,} × {columns:,}{cut if tp > 1 else ''}, in a bucket of {bucket}; as seen by {step.who}"),
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
        self.matrix = Matrix.find(layout, name, tp)
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
                _arrow(axes, (MARGIN + wide + 8, y), (WIDTH - MARGIN - wide - 8, y))
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
        edge = mix(colour, INK if ink_on(colour) == INK else "#FFFFFF", 0.5)
        looks = {"ec": edge, "hatch": TP_HATCHES[self.tp % 8], "gid": f"step-{move}-piece"}
        box(axes, x + piece.start * scale, y, max(piece.size * scale, 0.8), STRIP_HIGH, colour, **looks)
        box(axes, x, y, STRIP_WIDE, STRIP_HIGH, "none", ec=MUTED, lw=0.7, ls=(0, (2, 2)))
        a, b = x + where.start * scale + 0.8, x + where.end * scale - 0.8
        axes.plot([a, a, b, b], [y - 2, y - 6, y - 6, y - 2], color=INK, lw=1.8, solid_joinstyle="miter")

    def _arrows(self, down: str, up: str) -> Block:
        def paint(axes: Axes, top: float) -> None:
            for move, side, edge in ((down, "left", MARGIN + 10), (up, "right", WIDTH - MARGIN - 10)):
                ends = ((edge, top + 3), (edge, top + 39))
                _arrow(axes, *(ends if side == "left" else ends[::-1]))
                x = edge + 14 * (1 if side == "left" else -1)
                note = "elementwise" if move in ("momentum", "apply") else f"sends {self.sent(move)}"
                put(axes, x, top + 5, move, side, True)
                put(axes, x, top + 5 + ROW, note, side, color=MUTED)
            axes.hlines(top + 21, MARGIN + 136, WIDTH - MARGIN - 116, MUTED, lw=0.8, ls=(0, (1, 3)))

        return 42.0, paint


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = "-|>,head_length=7,head_width=3.5"
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, color=INK, lw=1.6, shrinkA=0, shrinkB=0))
