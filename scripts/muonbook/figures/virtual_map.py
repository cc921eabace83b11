"""The virtual map as a picture: one strip per bucket, every shard in its owner's colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from distmuon.sharding.layout import Bucket, Layout
from muonbook.figures.style import CARD, INK, LEFT, MARGIN, MUTED, PADDING, ROW, STRIP, TEXT, TITLE, TP_HATCHES, WIDTH
from muonbook.jobs import plural

from muonbook.figures.style import Block, box, dp_colour, hatch_on, mix, page, put, text_block, wide  # isort: skip

Fill = tuple[str, str]  # colour and hatch of an element

MAX_STRIPS = 60  # buckets; a longer map is a table, see `Layout.table`
SLIVER = 0.25  # of the longest strip: a shorter one is stretched to its length, under a bar of its true length


def draw_map(layout: Layout, tp: int = 1, title: str | None = None) -> Figure:
    """Draw the virtual map: one strip per bucket, true to scale in elements, every shard in its owner's colour.

    A bucket that would be a sliver is stretched, and a bar over it has its true length.
    tp: T. Every TP rank holds the same map with its own slice: one hatched row of each strip, up to eight.
    Raises ValueError for an empty layout and more than 60 buckets.
    """
    title = title or f"The virtual map: {layout.dp} DP × {tp} TP"
    return page([text_block(title, TITLE), *map_blocks(layout, tp)])


def describe_map(layout: Layout, tp: int = 1) -> str:
    """Return alt text for `draw_map`, computed from the layout."""
    cut = straddlers(layout)
    names = ", ".join(cut[:3]) + f" and {len(cut) - 3} more" * (len(cut) > 3)
    shards = f"{layout.dp} equal shards, one per DP rank" if layout.dp > 1 else "one shard"
    return f"Virtual map of {_size(layout, tp)}, each of {shards}. On more than one DP rank: {names or 'no parameter'}."


def straddlers(layout: Layout) -> list[str]:
    """Return the names of the parameters that more than one DP rank owns a piece of."""
    return [layout.specs[i].name for b in layout.buckets for i in b.params if len(layout.owners(b, i)) > 1]


def _size(layout: Layout, tp: int) -> str:
    padded, numel = (sum(getattr(bucket, part) for bucket in layout.buckets) for part in ("padded", "numel"))
    elements = f"{plural(numel, 'element')} + {padded - numel:,} padding" + " per TP rank" * (tp > 1)
    return f"{plural(len(layout.specs), 'parameter')}, {elements}, {plural(len(layout.buckets), 'bucket')}"


def map_blocks(layout: Layout, tp: int) -> list[Block]:
    """Return the map as blocks of a page; arguments and errors as in `draw_map`."""
    longest = max((bucket.padded for bucket in layout.buckets), default=0)
    if longest == 0:
        raise ValueError("this layout holds no elements, so there is nothing to draw.")
    if len(layout.buckets) > MAX_STRIPS:
        raise ValueError(f"{len(layout.buckets)} buckets do not fit a page of {MAX_STRIPS}; use a larger bucket_size.")
    blocks = [text_block(_size(layout, tp))]
    for bucket in layout.buckets:
        if bucket.bucket_idx == 0:
            dtype = layout.buffers[bucket.buffer_idx].param_dtype
            blocks.append(text_block(f"\nbuffer {bucket.buffer_idx}: {dtype}", TEXT))
        stretch = longest / bucket.padded if bucket.padded < SLIVER * longest else 1.0
        blocks += _strip(layout, bucket, tp, STRIP / longest, stretch)
    if any(bucket.padded > bucket.numel for bucket in layout.buckets):
        blocks.append(_note("padding, so that all shards of a bucket are equal", padding=True))
    if straddlers(layout):
        blocks.append(_note("owned by more than one DP rank"))
    if layout.dp > 8:
        blocks.append(text_block("Colours repeat every 8 DP ranks: lighter, then darker."))
    if tp > 8:
        blocks.append(text_block(f"TP ranks 8 to {tp - 1} hold the same map."))
    return blocks


def _note(text: str, padding: bool = False) -> Block:
    def paint(axes: Axes, top: float) -> None:
        if padding:
            box(axes, MARGIN, top + 1, 22, 10, PADDING)
        else:
            brackets(axes, [(MARGIN, MARGIN + 22)], top + 10)
        put(axes, MARGIN + 30, top, text, color=MUTED)

    return ROW + 1, paint


def brackets(axes: Axes, spans: Iterable[tuple[float, float]], y: float, gid: str | None = None) -> None:
    """Draw bold brackets over `y`, a little shorter than their spans, so that neighbours stay apart."""
    inner = [(a + min(1.5, (b - a) / 4), b - min(1.5, (b - a) / 4)) for a, b in spans]
    lines = [[(a, y - 1), (a, y - 5), (b, y - 5), (b, y - 1)] for a, b in inner]
    axes.add_collection(LineCollection(lines, colors=INK, linewidths=2.4, gid=gid), autolim=False)


def _strip(layout: Layout, bucket: Bucket, tp: int, true_scale: float, stretch: float) -> list[Block]:
    """Draw one bucket, and under it list its parameters if not all names found room.

    true_scale: points per element of a bucket that is not stretched.
    """
    scale = true_scale * stretch
    names = [layout.specs[i].name for i in bucket.params]
    cut = [len(layout.owners(bucket, i)) > 1 for i in bucket.params]
    ranges = [layout.global_ranges[i].relative_to(bucket.offset) for i in bucket.params]
    spans = [(LEFT + r.start * scale, LEFT + r.end * scale) for r in ranges]
    labels = _labels(names, spans)
    colours = [dp_colour(r) for r in range(layout.dp)]
    padding = bucket.padded - bucket.numel
    owned = [sum(layout.meta(bucket, i, r).local_range.size for i in bucket.params) for r in range(layout.dp)]
    shards = [
        tuple(LEFT + edge * scale for edge in bucket.shard(r).relative_to(bucket.offset)) for r in range(layout.dp)
    ]
    rows, ident = min(tp, 8), f"{bucket.buffer_idx}.{bucket.bucket_idx}"
    high = {1: 30.0, 2: 22.0}.get(rows, 17.0)
    levels = [label.level for label in labels] or [1]
    top_rows = 1 + (stretch > 1) + 1 + max(levels) - min(levels)
    lowest, head = min(levels), 11 + ROW * top_rows  # head: from the block's top to the strip
    size = f"{bucket.numel:,} + {padding:,} padding" if padding else plural(bucket.numel, "element")
    size += f" = {layout.dp} × {bucket.shard_size:,}"

    def paint(axes: Axes, top: float) -> None:
        y, end, right = top + head, top + head + rows * high, LEFT + bucket.padded * scale
        put(axes, MARGIN, top, f"bucket {bucket.bucket_idx}")
        put(axes, WIDTH - MARGIN, top, size, "right", color=MUTED)
        if stretch > 1:
            true = bucket.padded * true_scale
            box(axes, LEFT, top + ROW + 4, true, 7, INK, gid=f"true-length-{ident}")
            note = f"its true length; stretched {stretch:.0f} times:"
            put(axes, LEFT + true + 6, top + ROW, note, color=MUTED)
        for n, at, side, level in labels:
            text_y = y - 8 - ROW * (level - lowest + 1)
            if level:
                axes.vlines(at, text_y + 13, y, MUTED, lw=0.7)
            put(axes, at + {"left": -2, "right": 2, "center": 0}[side], text_y, names[n], side, cut[n])
        for row in range(rows):
            row_y = y + row * high
            for r, (colour, (a, b)) in enumerate(zip(colours, shards, strict=True)):
                tone, filled = mix(colour, "#FFFFFF" if sum(to_rgb(colour)) < 1 else INK, 0.5), owned[r] * scale
                of_rank = f"{ident}-dp{r}-tp{row}"
                box(axes, a, row_y, filled, high, colour, gid=f"shard-{of_rank}", ec=tone, hatch=TP_HATCHES[row])
                rest = max(0.0, b - a - filled) if owned[r] < bucket.shard_size else 0.0
                edge = 1.5 * (0 < rest < 2)  # seen even where a hair wide
                box(axes, b - rest, row_y, rest, high, PADDING, gid=f"padding-{of_rank}", ec=PADDING, lw=edge)
            if tp > 1:
                put(axes, LEFT - 8, row_y + high / 2 - 6, f"TP {row}", "right")
        axes.hlines([y + row * high for row in range(1, rows)], LEFT, right, CARD, lw=1)
        if min(b - a for a, b in shards if b > a) > 4:
            axes.vlines([a for a, _ in shards[1:]], y, end, CARD, lw=1)
        edges = sorted({*(edge for span in spans for edge in span)} - {right})
        axes.vlines(edges, y - 3, end, INK, lw=min(1.0, 0.2 + 0.2 * (right - LEFT) / len(edges)))
        brackets(axes, (span for span, several in zip(spans, cut, strict=True) if several), y, f"straddlers-{ident}")
        _rank_labels(axes, end + 3, shards)

    block = (head + rows * high + ROW + 14, paint)
    every = text_block("From left: " + ", ".join(names), rest=f" … {len(names)} in all")
    return [block] if len(labels) == len(names) else [block, every]


class _Label(NamedTuple):
    """Where name number `name` goes: aligned to `at` by its `side`; from level 1 on it is a flag on a pole."""

    name: int
    at: float
    side: str
    level: int


def _labels(names: Sequence[str], spans: Sequence[tuple[float, float]]) -> list[_Label]:
    """Find room for names over their slices, or as flags higher up if all the others can be flags.

    Flags go up from right to left, so that the next pole rises beside them; text and poles claim their place.
    """
    fit = [n for n, (a, b) in enumerate(spans) if wide(names[n]) <= b - a]
    over = [_Label(n, sum(spans[n]) / 2, "center", 0) for n in fit]
    flags: list[_Label] = []
    claimed: list[list[tuple[float, float]]] = [[] for _ in range(4)]
    for n in sorted(set(range(len(names))) - set(fit), reverse=True):
        at, room = sum(spans[n]) / 2, wide(names[n])
        sides = {"center": (at - room / 2, at + room / 2), "left": (at - 2, at + room), "right": (at - room, at + 2)}
        for level, (side, text) in ((level, item) for level in range(4) for item in sides.items()):
            claims = [*[(at - 2, at + 2)] * level, text]
            free = all(b <= c or d <= a for (a, b), row in zip(claims, claimed, strict=False) for c, d in row)
            if free and text[0] >= LEFT - 2 and text[1] <= WIDTH - MARGIN + 2:
                for claim, row in zip(claims, claimed, strict=False):
                    row.append(claim)
                flags.append(_Label(n, at, side, level + 1))
                break
        else:
            return over
    return over + flags


def _rank_labels(axes: Axes, y: float, shards: Sequence[tuple[float, ...]]) -> None:
    """Write DP ranks under their shards: all, or every second, fourth, eighth, ... where shards are narrow."""
    dp, narrowest = len(shards), min(b - a for a, b in shards if b > a)
    full = wide(f"DP {dp - 1}") <= narrowest
    stride = 1 if full else next(s for s in (2**k for k in range(64)) if s >= dp or s * narrowest >= wide(f"{dp}") + 2)
    if not full and 3 * stride > dp:
        put(axes, LEFT, y, f"DP 0–{dp - 1}" if dp > 1 else "DP 0")
        return
    if not full:
        put(axes, LEFT - 8, y, "DP", "right")
    for r, (a, b) in list(enumerate(shards))[::stride]:
        if b > a:
            put(axes, (a + b) / 2, y, f"DP {r}" if full else f"{r}", "center")


def paint_run(axes: Axes, x: float, y: float, width: float, height: float, fill: Fill) -> None:
    """Paint a rectangle in a colour and a hatch."""
    colour, hatch = fill
    looks = {"hatch": hatch, "ec": hatch_on(colour)} if hatch else {}
    box(axes, x, y, width, height, colour, **looks)


def paint_elements(axes: Axes, x: float, y: float, size: float, rows: Sequence[Sequence[Fill | None]]) -> None:
    """Paint a matrix, or a row of a buffer, as squares of `size` points; where there is no fill, the card shows.

    Runs of one fill are one rectangle, and all lines between squares one path: a frame of a moving picture stays light.
    """
    across, down = len(rows[0]) * size, len(rows) * size
    for n, row in enumerate(rows):
        left = x
        for fill, run in groupby(row):
            right = left + size * len(list(run))
            if fill is not None:
                paint_run(axes, left, y + n * size, right - left, size, fill)
            left = right
    ends = [((x + n * size, y), (x + n * size, y + down)) for n in range(1, len(rows[0]))]
    ends += [((x, y + n * size), (x + across, y + n * size)) for n in range(1, len(rows))]
    if ends:
        path = Path([end for pair in ends for end in pair], [Path.MOVETO, Path.LINETO] * len(ends))
        axes.add_patch(PathPatch(path, fc="none", ec=CARD, lw=0.7))
