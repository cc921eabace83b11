"""Seven ways to cut a training run over ranks, and Muon in each: a picture that moves.

Four ranks, and a little model: four layers, of which the third is a mixture of four experts, and norms that go to
AdamW. What a rank holds is read off the map (`layout.plan`) where the map says it, and what Muon sends comes from the
same prediction as everywhere. The price list asks the same of a published model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.optim.newton_schulz import flops
from distmuon.sharding.layout import ITEM_BYTES, Layout, ParamSpec, plan
from distmuon.sharding.ledger import ring_bytes
from distmuon.verify.prediction import predict_step
from muonbook.figures.player import Frame
from muonbook.figures.style import CARD_EDGE, INK, MARGIN, MUTED, ROW, TP_HATCHES, WIDTH, Block

from muonbook.figures.style import box, card, dp_colour, hatch_on, put  # isort: skip

RANKS = 4
EVERYTHING = range(RANKS)

# ---- The little model -------------------------------------------------------------------------------------


class TinyParameter(NamedTuple):
    """A parameter of the little model: its place in the square of its row, in elements, and its cut over TP."""

    name: str
    row: int  # of the picture: a layer, or the norms
    x: int
    y: int
    shape: tuple[int, int]
    tp_dim: int | None


SIDE = 8  # elements along a layer's square
EXPERTS = tuple(TinyParameter(f"expert {n}", 2, 4 * (n % 2), 4 * (n // 2), (4, 4), 0) for n in range(RANKS))
NORMS = TinyParameter("norms", RANKS, 0, 0, (RANKS, SIDE), None)  # one per layer, drawn as one thing
PARTS = (
    TinyParameter("layer 1", 0, 0, 0, (SIDE, SIDE), 0),
    TinyParameter("layer 2", 1, 0, 0, (SIDE, SIDE), 1),
    *EXPERTS,
    TinyParameter("layer 4", 3, 0, 0, (SIDE, SIDE), 0),
    NORMS,
)
MUON = tuple(index for index, part in enumerate(PARTS) if part is not NORMS)
ROW_NAMES = ("layer 1", "layer 2", "experts", "layer 4", "norms")


class HeldBlock(NamedTuple):
    """Rows and columns of a part."""

    part: TinyParameter
    rows: range
    columns: range

    @property
    def numel(self) -> int:
        return len(self.rows) * len(self.columns)


def _of(part: TinyParameter, share: int | None = None, dim: int = 0) -> HeldBlock:
    """Return a part, or the `share`-th quarter of it along `dim`."""
    sides = [range(n) for n in part.shape]
    if share is not None:
        length = part.shape[dim] // RANKS
        sides[dim] = range(share * length, (share + 1) * length)
    return HeldBlock(part, *sides)


def _whole(rank: int) -> list[HeldBlock]:
    return [_of(part) for part in PARTS]


def _shard(rank: int) -> list[HeldBlock]:
    """Return what a rank's shard of the one bucket holds; its boundaries fall between rows."""
    found = []
    for part, meta in zip(PARTS, _layout(RANKS).view(rank), strict=True):
        start, end = (Fraction(n, part.shape[1]) for n in meta.range_in_param)
        assert start.denominator == end.denominator == 1, part.name
        found.append(HeldBlock(part, range(int(start), int(end)), range(part.shape[1])))
    return [piece for piece in found if piece.numel]


def _rows(rank: int) -> list[HeldBlock]:
    return [_of(part, rank) for part in PARTS]


def _blocks(rank: int) -> list[HeldBlock]:
    return [_of(part) if part.tp_dim is None else _of(part, rank, part.tp_dim) for part in PARTS]


def _stage(rank: int) -> list[HeldBlock]:
    return [_of(NORMS, rank) if part is NORMS else _of(part) for part in PARTS if part is NORMS or part.row == rank]


def _own_expert(rank: int) -> list[HeldBlock]:
    return [_of(part) for part in PARTS if part not in EXPERTS or part is EXPERTS[rank]]


def _layout(dp: int, tp: int = 1) -> Layout:
    specs = []
    for part in PARTS:
        local = [n // tp if dim == part.tp_dim else n for dim, n in enumerate(part.shape)]
        specs.append(ParamSpec(part.name, tuple(local), "float32", part.tp_dim))
    return plan(specs, dp)


# ---- The seven cuts ---------------------------------------------------------------------------------------

Holding = Callable[[int], list[HeldBlock]]  # rank -> what it keeps
TENSORS = ("W", "G", "M")  # weights, gradients, momentum


class Cut(NamedTuple):
    """One way to cut, as the picture shows it.

    kept: what a rank keeps of weights, gradients and momentum. data: which (sequences, positions) of the batch it
    computes. shown: who keeps what, in words. by: whether ranks differ as "dp" ranks, "tp" ranks, or as neither.
    gathered: in what form matrices are cut, "bucket", "rows" or "blocks"; None where they are whole.
    """

    name: str
    says: str
    shown: str
    kept: tuple[Holding, Holding, Holding]
    data: Callable[[int], tuple[Sequence[int], Sequence[int]]]
    by: str = "dp"
    gathered: str | None = None


def _sequence(rank: int) -> tuple[Sequence[int], Sequence[int]]:
    return (rank,), EVERYTHING


def _all_data(rank: int) -> tuple[Sequence[int], Sequence[int]]:
    return EVERYTHING, EVERYTHING


def _positions(rank: int) -> tuple[Sequence[int], Sequence[int]]:
    return EVERYTHING, (rank,)


ALONE = Cut(
    "One rank has it all", "Three wait. Where would you cut?",
    "Rank 0 computes the batch and keeps weights, gradients and momentum of four layers. The others keep nothing.",
    (_whole, _whole, _whole), _all_data,
)  # fmt: skip
CUTS = (
    Cut(
        "DP", "Cut the batch.", "Each rank computes one sequence of four and keeps everything.",
        (_whole, _whole, _whole), _sequence,
    ),
    Cut(
        "ZeRO-1", "Cut the batch, and M as one strip.", "Each rank keeps all weights and gradients, and a quarter of "
        "the strip of momentum and norms: rank 0 layer 1 and a row of layer 2, rank 1 the rest of it and an expert.",
        (_whole, _whole, _shard), _sequence, gathered="bucket",
    ),
    Cut(
        "ZeRO-3, as FSDP2", "W as well, and all by rows.", "Each rank keeps a quarter of the rows of every weight, "
        "gradient and momentum.",
        (_rows, _rows, _rows), _sequence, gathered="rows",
    ),
    Cut(
        "TP", "Cut every matrix.", "All ranks compute the whole batch; each keeps a block of rows, in layer 2 of "
        "columns, of every matrix, and all norms.",
        (_blocks, _blocks, _blocks), _all_data, by="tp", gathered="blocks",
    ),
    Cut(
        "PP", "Cut between layers.", "The whole batch passes through all ranks; each keeps one layer, whole, with its "
        "gradients and momentum.",
        (_stage, _stage, _stage), _all_data, by="stage",
    ),
    Cut(
        "EP", "Cut between experts.", "Each rank computes one sequence, and keeps one expert of four, whole, and "
        "everything that is no expert.",
        (_own_expert, _own_expert, _own_expert), _sequence,
    ),
    Cut(
        "CP", "Cut every sequence.", "Each rank computes a quarter of every sequence and keeps everything, as with DP.",
        (_whole, _whole, _whole), _positions,
    ),
)  # fmt: skip


def sent(cut: Cut, rank: int) -> int:
    """Return how many elements of momentum a rank sends in a step, so that matrices become whole (`gather_all`)."""
    if cut.gathered is None:
        return 0
    if cut.gathered == "rows":
        return sum(ring_bytes("all_gather", math.prod(PARTS[index].shape), RANKS) for index in MUON)
    dp, tp = (RANKS, 1) if cut.gathered == "bucket" else (1, RANKS)
    dp_rank = rank if dp > 1 else 0
    with_muon, without = (
        predict_step(_layout(dp, tp), tp, dp_rank, muon, gather_dtype="float32") for muon in (MUON, ())
    )
    return (with_muon.total().sent_bytes - without.total().sent_bytes) // ITEM_BYTES["float32"]


def work(cut: Cut, rank: int) -> Fraction:
    """Return which share of the whole model's Newton–Schulz a rank does: all matrices that it keeps a part of."""
    matrices = {piece.part for piece in cut.kept[2](rank)} - {NORMS}
    return Fraction(sum(flops(part.shape) for part in matrices), sum(flops(PARTS[index].shape) for index in MUON))


def kept(cut: Cut, rank: int) -> int:
    """Return how many elements of the matrices' momentum a rank keeps."""
    return sum(piece.numel for piece in cut.kept[2](rank) if piece.part is not NORMS)


# ---- The picture that moves -------------------------------------------------------------------------------

LABEL, UNIT, GAP = 50.0, 2.4, 3.2  # room for the names of rows; points per element; between squares
SQUARE = SIDE * UNIT
DEVICE = (WIDTH - 2 * MARGIN - LABEL) / RANKS  # of a rank, across
LOW = (0.0, 26.0, 52.0, 78.0, 104.0, 118.0)  # where the rows of squares begin, and where the last one ends
CELL = (3 * SQUARE + 2 * GAP) / RANKS, 5.0  # of the batch, across and down


def moving_cuts() -> list[Frame]:
    """Return the frames: one rank with everything first, and then each cut."""
    captions = ["W are weights, G gradients, M is momentum."]
    captions += [f"Muon {'gathers' if cut.gathered else 'finds every matrix whole'}.{_strip(cut)}" for cut in CUTS]
    return [
        Frame(
            _draw(cut, ranks), f"{cut.name}. {cut.says} {cut.shown} {' '.join(map(' '.join, _told(cut, ranks)))}", line
        )
        for cut, ranks, line in zip((ALONE, *CUTS), ([0], *[EVERYTHING] * len(CUTS)), captions, strict=True)
    ]


def _strip(cut: Cut) -> str:
    if cut.gathered != "bucket":
        return ""
    (bucket,) = _layout(RANKS).buckets
    return f" AdamW's norms lie in the same strip of {bucket.padded} elements, so a shard has {bucket.shard_size}."


def _draw(cut: Cut, ranks: Sequence[int]) -> Figure:
    return card(cut.name, cut.says, _devices(cut, ranks), _foot(_told(cut, ranks)))


def _looks(cut: Cut, rank: int) -> tuple[str, str]:
    """Return colour and hatch of what a rank holds: its DP rank's and its TP rank's, as everywhere."""
    dp, tp = (rank, 0) if cut.by == "dp" else (0, rank) if cut.by == "tp" else (0, 0)
    return dp_colour(dp), TP_HATCHES[tp]


def _devices(cut: Cut, ranks: Sequence[int]) -> Block:
    def paint(axes: Axes, top: float) -> None:
        batch = top + 8 + ROW
        squares = batch + RANKS * CELL[1] + 6 + ROW
        put(axes, MARGIN, batch + 4, "batch", color=MUTED)
        for row, name in enumerate(ROW_NAMES):
            put(axes, MARGIN, squares + LOW[row] + (3 if row < RANKS else -2), name, color=MUTED)
        for rank in EVERYTHING:
            left = MARGIN + LABEL + rank * DEVICE
            put(axes, left, top + 5, f"rank {rank}", bold=rank in ranks, color=INK if rank in ranks else MUTED)
            colour, hatch = _looks(cut, rank)
            sequences, positions = cut.data(rank) if rank in ranks else ((), ())
            for y, x in product(EVERYTHING, EVERYTHING):
                fill = colour if y in sequences and x in positions else "none"
                box(axes, left + x * CELL[0], batch + y * CELL[1], *CELL, fill, ec=MUTED, lw=0.5)
            for column, letter in enumerate(TENSORS):
                at = left + column * (SQUARE + GAP)
                put(axes, at + SQUARE / 2, squares - ROW + 1, letter, "center")
                _tensor(axes, at, squares, cut.kept[column](rank) if rank in ranks else [], colour, hatch)

    return 8 + ROW + RANKS * CELL[1] + 6 + ROW + LOW[-1] + 12, paint


def _tensor(axes: Axes, left: float, top: float, pieces: Sequence[HeldBlock], colour: str, hatch: str) -> None:
    def place(part: TinyParameter, row: int = 0, column: int = 0) -> tuple[float, float]:
        return left + (part.x + column) * UNIT, top + LOW[part.row] + (part.y + row) * UNIT

    for part, rows, columns in pieces:
        at = place(part, rows.start, columns.start)
        box(axes, *at, len(columns) * UNIT, len(rows) * UNIT, colour, hatch=hatch, ec=hatch_on(colour))
    for part in PARTS:
        box(axes, *place(part), part.shape[1] * UNIT, part.shape[0] * UNIT, "none", ec=MUTED, lw=0.6)


def _told(cut: Cut, ranks: Sequence[int]) -> list[tuple[str, str]]:
    """Return what the busiest rank keeps of the matrices' momentum, sends of it, and computes: label and text."""
    most, away = max(kept(cut, rank) for rank in ranks), max(sent(cut, rank) for rank in ranks)
    share = max(work(cut, rank) for rank in ranks)
    total = sum(math.prod(PARTS[index].shape) for index in MUON)
    return [
        ("M kept", f"{most} of {total} elements, {'in pieces' if cut.gathered else 'matrices whole'}"),
        ("M sent", f"{away} elements, to make matrices whole" if away else "nothing"),
        ("Newton–Schulz", f"{float(share):.0%} of the whole model's work"),
    ]


def _foot(told: Sequence[tuple[str, str]]) -> Block:
    def paint(axes: Axes, top: float) -> None:
        axes.plot([MARGIN, WIDTH - MARGIN], [top, top], color=CARD_EDGE, lw=1)
        for row, (label, text) in enumerate(told):
            put(axes, MARGIN, top + 8 + row * ROW, label, bold=True)
            put(axes, MARGIN + 102, top + 8 + row * ROW, text)

    return 8 + len(told) * ROW, paint
