"""The chapter's moving picture: a matrix that straddles shard boundaries, on its way through the DP gather and back.

It has one lane per DP rank: on the left what the rank holds of the bucket, on the right what it holds as matrices. An
element has the colour of the rank that it came from, or that computed it. Places and owners are the engine's `Layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from matplotlib.axes import Axes

from distmuon.sharding.layout import ITEM_BYTES, Bucket, Layout
from distmuon.sharding.ledger import ring_bytes
from muonbook.figures.player import Frame
from muonbook.figures.style import INK, MARGIN, MUTED, PADDING, TEXT

from muonbook.figures.style import box, dp_colour, page, put  # isort: skip
from muonbook.figures.virtual_map import Fill, paint_elements, paint_run

BUCKET_LEFT, ELEMENT, HIGH, SQUARE = 58.0, 4.0, 16.0, 10.0  # the bucket's left; of an element of it; of one of a matrix
LANES, PITCH = 60.0, 50.0  # top of the first lane below the title, from one to the next
ZERO: Fill = ("#FFFFFF", "")


@dataclass
class Held:
    """What one rank holds: fills by place in the bucket, and of each matrix; None where it holds nothing."""

    bucket: list[Fill | None]
    matrices: dict[int, list[Fill | None]] = field(default_factory=dict)


def frames_of_gather(layout: Layout, muon: Sequence[int], followed: int) -> list[Frame]:
    """Return the frames of one bucket's way through a step of `gather_all`.

    layout: of one bucket. muon: indices of its matrices. followed: the one that captions and alt texts count.
    """
    (bucket,), dp = layout.buckets, layout.dp
    name, numel = layout.specs[followed].name, layout.specs[followed].numel
    owners = {index: list(layout.owners(bucket, index)) for index in muon}
    sent = ring_bytes("all_gather", ITEM_BYTES["bfloat16"] * bucket.padded, dp)
    others = [layout.specs[index].name for index in bucket.params if index not in muon]

    start = [_pieces(layout, bucket, muon, rank) for rank in range(dp)]
    packed = [Held(_packed(layout, bucket, muon, rank)) for rank in range(dp)]
    states: list[tuple[str, str, list[Held]]] = [
        (
            "momentum",
            f"The {numel} elements of {name} lie on {len(owners[followed])} ranks, "
            "but Newton–Schulz needs them in one place.",
            start,
        ),
        (
            "pack",
            "Every rank copies its pieces into a message in bf16. "
            f"It holds zeros for AdamW's {' and '.join(others)} and for the padding (grey).",
            packed,
        ),
    ]
    for hop in range(1, dp):
        rows = [Held(_merged([packed[(rank - back) % dp].bucket for back in range(hop + 1)])) for rank in range(dp)]
        end = "" if hop < dp - 1 else f" Each has sent {sent} bytes and now holds the whole bucket."
        states.append((f"dp_gather, hop {hop} of {dp - 1}", f"Every rank passes a shard on to the next.{end}", rows))
    full = states[-1][2]
    unpacked = [_unpacked(layout, bucket, full[rank], owners, rank) for rank in range(dp)]
    solved = [
        Held([None] * bucket.padded, {i: [(dp_colour(rank), "")] * layout.specs[i].numel for i in held.matrices})
        for rank, held in enumerate(unpacked)
    ]
    twice = ", ".join(f"{layout.specs[i].name} on {len(ranks)} ranks" for i, ranks in owners.items())
    states += [
        (
            "unpack",
            "Each rank cuts out the matrices of which it owns a piece, and drops the rest of the bucket.",
            unpacked,
        ),
        (
            "newton_schulz",
            f"Every owner orthogonalizes the whole matrix ({twice}), so the same work is done more than once.",
            solved,
        ),
        (
            "dp_shard",
            "Each rank keeps its own piece of the update. Nothing is sent, because it computed all of it.",
            start,
        ),
    ]
    return [_frame(layout, bucket, muon, followed, *state) for state in states]


def _pieces(layout: Layout, bucket: Bucket, muon: Sequence[int], rank: int) -> Held:
    """Return the pieces that a rank owns, in the bucket and in the shape of their matrices."""
    held = Held([None] * bucket.padded)
    for index in muon:
        meta = layout.meta(bucket, index, rank)
        if meta.owned:
            fills: list[Fill | None] = [None] * layout.specs[index].numel
            for place in range(*meta.range_in_param):
                fills[place] = (dp_colour(rank), "")
            held.matrices[index] = fills
            for place in range(*meta.local_range.relative_to(bucket.offset)):
                held.bucket[place] = (dp_colour(rank), "")
    return held


def _packed(layout: Layout, bucket: Bucket, muon: Sequence[int], rank: int) -> list[Fill | None]:
    """Return a rank's shard as it travels: pieces in place, zeros for AdamW, and padding."""
    row = _pieces(layout, bucket, muon, rank).bucket
    for place in range(*bucket.shard(rank).relative_to(bucket.offset)):
        if row[place] is None:
            row[place] = ZERO if place < bucket.numel else (PADDING, "")
    return row


def _merged(rows: Sequence[list[Fill | None]]) -> list[Fill | None]:
    return [next((fill for fill in fills if fill is not None), None) for fills in zip(*rows, strict=True)]


def _unpacked(layout: Layout, bucket: Bucket, full: Held, owners: dict[int, list[int]], rank: int) -> Held:
    """Return the matrices cut out of the gathered bucket, and what of the bucket they were."""
    held = Held([None] * bucket.padded)
    for index, ranks in owners.items():
        if rank in ranks:
            where = layout.global_ranges[index].relative_to(bucket.offset).as_slice
            held.matrices[index] = full.bucket[where]
    return held


def _frame(
    layout: Layout, bucket: Bucket, muon: Sequence[int], followed: int, title: str, caption: str, lanes: list[Held]
) -> Frame:
    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top, title, bold=True, size=TEXT)
        put(axes, BUCKET_LEFT, top + 23, "in the bucket", color=MUTED)
        for index in bucket.params:
            start, end = layout.global_ranges[index].relative_to(bucket.offset)
            put(axes, BUCKET_LEFT + ELEMENT * (start + end) / 2, top + 42, layout.specs[index].name, "center")
        if any(held.matrices for held in lanes):
            put(axes, _lefts(layout, bucket, muon)[muon[0]], top + 23, "as matrices", color=MUTED)
            for index, x in _lefts(layout, bucket, muon).items():
                put(axes, x + SQUARE * layout.specs[index].shape[1] / 2, top + 42, layout.specs[index].name, "center")
        for rank, held in enumerate(lanes):
            _lane(axes, top + LANES + rank * PITCH, layout, bucket, muon, rank, held)

    name, where = layout.specs[followed].name, layout.global_ranges[followed].relative_to(bucket.offset).as_slice
    counts = [
        sum(fill is not None for fill in held.matrices.get(followed, held.bucket[where])) for held in lanes
    ]  # a matrix once it is there, its place in the bucket before
    alt = f"{title}: {caption} Of {name}, DP 0 to {layout.dp - 1} hold {', '.join(map(str, counts))} elements."
    return Frame(page([(LANES + layout.dp * PITCH, paint)]), alt, caption)


def _lane(axes: Axes, y: float, layout: Layout, bucket: Bucket, muon: Sequence[int], rank: int, held: Held) -> None:
    """Draw what one rank holds: of the bucket on the left, as matrices on the right."""
    put(axes, MARGIN + 4, y + 11, f"DP {rank}")
    box(axes, MARGIN - 4, y, 4, 36, dp_colour(rank))
    middle, across = y + 10, ELEMENT * bucket.padded
    place = 0
    for fill, run in groupby(held.bucket):
        several = len(list(run))
        if fill is not None:
            paint_run(axes, BUCKET_LEFT + ELEMENT * place, middle, ELEMENT * several, HIGH, fill)
        if fill == ZERO:
            put(axes, BUCKET_LEFT + ELEMENT * (place + several / 2), middle + 2, "0", "center")
        place += several
    box(axes, BUCKET_LEFT, middle, across, HIGH, "none", ec=MUTED, lw=0.8)
    ends = [layout.global_ranges[index].relative_to(bucket.offset).end for index in bucket.params]
    axes.vlines([BUCKET_LEFT + ELEMENT * end for end in ends], middle - 3, middle + HIGH + 3, INK, lw=0.8)
    for index, x in _lefts(layout, bucket, muon).items():
        rows, columns = layout.specs[index].shape
        fills = held.matrices.get(index)
        if fills is not None:
            grid = [fills[columns * row : columns * (row + 1)] for row in range(rows)]
            paint_elements(axes, x, y, SQUARE, grid)
            box(axes, x, y, SQUARE * columns, SQUARE * rows, "none", ec=MUTED, lw=0.8)


def _lefts(layout: Layout, bucket: Bucket, muon: Sequence[int]) -> dict[int, float]:
    """Return where each matrix is drawn, from the left: beside the bucket, in its order."""
    lefts, x = {}, BUCKET_LEFT + ELEMENT * bucket.padded + 26
    for index in muon:
        lefts[index] = x
        x += SQUARE * layout.specs[index].shape[1] + 18
    return lefts
