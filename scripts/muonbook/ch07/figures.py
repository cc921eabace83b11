"""Chapter 7's pictures: the virtual map as it is made, frame by frame, and for how many ranks every matrix straddles.

Each frame shows the parameters in their shapes above, and the buckets they lie in below. Every colour and every caption
comes from the `Layout` that the engine plans with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.sharding.layout import Bucket, Layout, ParamSpec, plan
from muonbook.ch07.experiments import owned_runs
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_curves, draw_curves
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, PADDING, WIDTH

from muonbook.figures.style import box, dp_colour, ink_on, mix, page, put  # isort: skip
from muonbook.figures.virtual_map import Fill, brackets, paint_elements, paint_run, straddlers
from muonbook.jobs import plural

SQUARE, HIGH, PITCH = 11.5, 26.0, 56.0  # of an element above, of a strip below, from one strip to the next
STRIPS, STRIPS_LEFT = 156.0, 70.0  # top of the strips below the first line, and their left
LEGEND = 296.0  # left of the ranks
UNOWNED = mix(COLD, CARD, 0.35)


@dataclass(frozen=True)
class Stage:
    """What one frame shows of a layout.

    made: how far the map is: 0 nothing, 1 poured, 2 buckets, 3 padding, 4 shards, 5 brackets over what straddles.
    changed: the knob that was turned. focus: the rank that keeps its colour.
    """

    layout: Layout
    bucket_size: int
    made: int = 5
    changed: str = ""
    focus: int | None = None


def frames_of_map(model: Sequence[ParamSpec], dp: int, bucket_sizes: tuple[int, int]) -> list[Frame]:
    """Return the frames: the map of `model` as it is made, then other maps of it, then one rank's share of the first.

    bucket_sizes: the first map's, and a smaller one. One bucket of the first map must need padding.
    """
    size, smaller = bucket_sizes
    first, half, small = (plan(model, *knobs) for knobs in ((dp, size), (dp // 2, size), (dp, smaller)))
    buffer = plan(model, dp, sum(spec.numel for spec in model))
    closed = " and ".join(str(bucket.numel) for bucket in first.buckets)
    short = next(bucket for bucket in first.buckets if bucket.padded > bucket.numel)
    padding = plural(short.padded - short.numel, "element")
    owners = [len(layout.owners(layout.buckets[0], 0)) for layout in (small, first)]
    frames = [
        (
            f"{plural(len(model), 'parameter')}, {buffer.buckets[0].numel} elements, {dp} ranks, equal shares. "
            "Who keeps what?",
            Stage(first, size, made=0),
        ),
        ("Lay all elements end to end, in order. This row is the buffer.", Stage(buffer, size, made=1)),
        (
            f"Close a bucket as soon as it holds {size} elements. The buckets hold {closed}.",
            Stage(first, size, made=2),
        ),
        (
            f"{short.numel} is no multiple of {dp}, so {padding} of padding make it {short.padded}.",
            Stage(first, size, made=3),
        ),
        (
            f"Cut every bucket into {dp} equal shards, one per rank. The cuts fall where they fall.",
            Stage(first, size, made=4),
        ),
        (f"Under a bracket, more than one rank owns a piece. {_straddling(first)}", Stage(first, size)),
        (
            f"With D = {half.dp}, shards are longer and make fewer cuts. {_straddling(half)}",
            Stage(half, size, changed="D"),
        ),
        (
            f"With buckets of {smaller}, shards are shorter. "
            f"{model[0].name} has {owners[0]} owners instead of {owners[1]}.",
            Stage(small, smaller, changed="bucket size"),
        ),
        (
            f"Back to the first map. Rank 1 keeps {owned_runs(first, 1).replace(' ', ', ')}.",
            Stage(first, size, focus=1),
        ),
    ]
    layouts = [stage.layout for _, stage in frames]
    scale = (WIDTH - MARGIN - STRIPS_LEFT) / max(bucket.padded for layout in layouts for bucket in layout.buckets)
    strips = max(len(layout.buckets) for layout in layouts)
    return [_frame(stage, caption, scale, strips) for caption, stage in frames]


def _straddling(layout: Layout) -> str:
    names = straddlers(layout)
    if len(names) in (0, len(layout.specs)):
        return f"{'Every' if names else 'No'} parameter straddles."
    return f"Only {' and '.join(names)} {'straddle' if len(names) > 1 else 'straddles'}."


def _frame(stage: Stage, caption: str, scale: float, strips: int) -> Frame:
    def paint(axes: Axes, top: float) -> None:
        _knobs(axes, top, stage)
        _shapes(axes, top + 26, stage)
        _strips(axes, top + STRIPS, stage, scale)

    figure = page([(STRIPS + strips * PITCH, paint)])
    return Frame(figure, f"{caption}{_shares(stage)}", caption)


def _shares(stage: Stage) -> str:
    """Return who owns what, for the alt text of a frame that shows it."""
    if stage.made < 4 or stage.focus is not None:
        return ""
    runs = "; ".join(f"DP {rank}: {owned_runs(stage.layout, rank)}" for rank in range(stage.layout.dp))
    return f" {runs}."


def _knobs(axes: Axes, top: float, stage: Stage) -> None:
    knobs = {"D": stage.layout.dp, "bucket size": stage.bucket_size}
    for x, (name, value) in zip((MARGIN, MARGIN + 52), knobs.items(), strict=True):
        put(axes, x, top, f"{name} = {value}", bold=True, color=ACCENT if name == stage.changed else INK)


def _fill(stage: Stage, bucket: Bucket, place: int) -> Fill:
    """Return how the element at `place` of a bucket is painted: in its owner's colour, if it has an owner yet."""
    if stage.made < 4:
        return UNOWNED, ""
    rank = place // bucket.shard_size
    colour = dp_colour(rank) if stage.focus in (None, rank) else mix(dp_colour(rank), CARD, 0.8)
    return colour, ""


def _elements(stage: Stage, bucket: Bucket, index: int) -> list[list[Fill | None]]:
    """Return how a parameter is painted, in its shape; a vector stands upright."""
    start = stage.layout.global_ranges[index].start - bucket.offset
    rows, columns = [*stage.layout.specs[index].shape, 1][:2]
    return [[_fill(stage, bucket, start + i * columns + j) for j in range(columns)] for i in range(rows)]


def _shapes(axes: Axes, top: float, stage: Stage) -> None:
    """Draw every parameter as the matrix or the vector that it is, and the colours of the ranks beside them."""
    lefts, x = [], MARGIN
    for spec in stage.layout.specs:
        lefts.append(x)
        x += max(SQUARE * [*spec.shape, 1][1], 30.0) + 16
    for bucket in stage.layout.buckets:
        for index in bucket.params:
            spec = stage.layout.specs[index]
            put(axes, lefts[index], top, f"{spec.name}: {' × '.join(map(str, spec.shape))}")
            paint_elements(axes, lefts[index], top + 17, SQUARE, _elements(stage, bucket, index))
    for rank in range(stage.layout.dp):
        box(axes, LEGEND, top + 17 + 20 * rank, 13, 13, dp_colour(rank))
        put(axes, LEGEND + 18, top + 17 + 20 * rank, f"DP {rank}", bold=rank == stage.focus)


def _strips(axes: Axes, top: float, stage: Stage, scale: float) -> None:
    if stage.made == 0:
        _question(axes, top, stage.layout.dp)
        return
    for n, bucket in enumerate(stage.layout.buckets):
        y = top + 17 + n * PITCH
        put(axes, MARGIN, y + HIGH / 2 - 6, f"bucket {n}" if stage.made > 1 else "buffer")
        _strip(axes, y, stage, bucket, scale)


def _question(axes: Axes, top: float, dp: int) -> None:
    across = (WIDTH - 2 * MARGIN + 8) / dp
    for rank in range(dp):
        x, colour = MARGIN + rank * across, dp_colour(rank)
        box(axes, x, top + 20, across - 8, 60, colour)
        put(axes, x + (across - 8) / 2, top + 26, f"DP {rank}", "center", color=ink_on(colour))
        put(axes, x + (across - 8) / 2, top + 44, "?", "center", True, color=ink_on(colour), size=20)


def _strip(axes: Axes, y: float, stage: Stage, bucket: Bucket, scale: float) -> None:
    """Draw a bucket: its parameters, cut at the ends of shards, and its padding."""
    layout, end = stage.layout, STRIPS_LEFT + bucket.numel * scale
    spans = []
    for index in bucket.params:
        whole = layout.global_ranges[index]
        owners = layout.owners(bucket, index)
        for rank in owners:
            piece = layout.meta(bucket, index, rank).local_range.relative_to(bucket.offset)
            fill = _fill(stage, bucket, piece.start)
            paint_run(axes, STRIPS_LEFT + piece.start * scale, y, piece.size * scale, HIGH, fill)
        a, b = (STRIPS_LEFT + edge * scale for edge in whole.relative_to(bucket.offset))
        cut = stage.made >= 5 and len(owners) > 1
        spans += [(a, b)] * cut
        put(axes, (a + b) / 2, y - 21, layout.specs[index].name, "center", cut)
        axes.vlines(a, y - 2, y + HIGH, INK, lw=0.9)
    axes.vlines(end, y - 2, y + HIGH, INK, lw=0.9)
    if stage.made >= 3:
        box(axes, end, y, (bucket.padded - bucket.numel) * scale, HIGH, PADDING)
    brackets(axes, spans, y)


def draw_straddling(straddling: Mapping[int, int], matrices: int) -> tuple[Figure, str]:
    """Return a plot of {DP ranks: matrices that straddle}, of so many matrices, and its description."""
    curves = {f"{matrices} matrices": (list(straddling), list(straddling.values()))}
    whole = [ranks for ranks, number in straddling.items() if number < matrices]
    cut = min((ranks for ranks in straddling if ranks > max(whole, default=0)), default=None)
    title = "Some matrices are still whole" if cut is None else f"From {cut} ranks on, every matrix is cut"
    axes = ("DP ranks", "matrices that straddle")
    return draw_curves(curves, *axes, title=title, dots=True), describe_curves(curves, *axes, title=title)
