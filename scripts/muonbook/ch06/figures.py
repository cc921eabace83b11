"""Chapter 6's pictures: ZeRO-1 moving, and what ZeRO's stages keep and send.

In the moving one a strip is one rank's memory, as wide as its bytes. What all ranks hold alike is pale blue; what a
rank alone holds or has made has its colour, and a mean of all ranks has the stripes of all. What is painted is what is
allocated: the rest of a rank's gradient turns pale after the reduce-scatter, and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.sharding.ledger import ring_bytes
from muonbook.figures.player import Frame
from muonbook.figures.plots import describe_bars, draw_bars
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, MUTED, TEXT, WIDTH

from muonbook.figures.style import box, card, dp_colour, mix, put  # isort: skip

KINDS = {"w": 2, "g": 4, "master": 4, "m": 4, "v": 4}  # bytes per parameter: bf16, then float32
CUT = ("master", "m", "v")
ALIKE, GAP, NAMES, HIGH, STEP = mix(COLD, CARD, 0.6), 6.0, 40.0, 26.0, 34.0
SCALE = (WIDTH - 2 * MARGIN - NAMES - GAP * (len(KINDS) - 1)) / sum(KINDS.values())  # points per byte

WHOLE, OWN, SHARD, MEAN, MIXED, JOINED = "whole", "own", "shard", "mean", "mixed", "joined"  # how a kind is held


class Instant(NamedTuple):
    """What the ranks hold at one instant. held: kind -> how; framed: the kinds to look at; sent: bytes so far."""

    title: str
    caption: str
    held: dict[str, str]
    framed: tuple[str, ...]
    sent: float


def sent_bytes(D: int) -> tuple[float, float, float]:
    """Return what a rank sends per parameter: reduce-scatter of gradients, all-gather of parameters, an all-reduce."""
    ways = (("reduce_scatter", "g"), ("all_gather", "w"), ("all_reduce", "g"))
    reduce, gather, all_reduce = (ring_bytes(op, D * KINDS[kind], D) / D for op, kind in ways)
    return reduce, gather, all_reduce


def bytes_on_a_rank(held: dict[str, str], D: int) -> float:
    """Return what a rank keeps per parameter; the gradient's buffer is there, whatever is in it."""
    return sum(size / (D if held[kind] == SHARD else 1) for kind, size in KINDS.items())


def _instants(D: int) -> list[Instant]:
    plain = {"w": WHOLE, "g": OWN, "master": WHOLE, "m": WHOLE, "v": WHOLE}
    cut = plain | dict.fromkeys(CUT, SHARD)
    reduce, gather, all_reduce = sent_bytes(D)
    mean, part = cut | {"g": MEAN}, f"1/{D}"
    mixed, joined = mean | {"w": MIXED}, mean | {"w": JOINED}
    all_, ours, both = bytes_on_a_rank(plain, D), bytes_on_a_rank(cut, D), reduce + gather
    said = (
        f"Plain data parallelism: each rank keeps {all_:g} bytes per parameter.",
        f"Master, m and v are the same numbers on all {D} ranks.",
        f"ZeRO-1: each rank keeps {part} of master, m and v. But who steps the rest?",
        "Each rank has a gradient g of its own data. AdamW wants their mean.",
        f"Each rank gets the mean for the {part} that it owns. The rest of g is of no more use, but stays allocated.",
        f"Each rank steps its {part}: mean, m, v and master are all there.",
        f"Rounded to bf16: {part} of w is new, the rest still old.",
        "The new pieces go round, and every rank has all of w again.",
        f"A rank keeps {ours:g} bytes, not {all_:g}. "
        f"It has sent {both:g}, where an all-reduce of g sends {all_reduce:g}.",
    )
    shown: list[tuple[str, tuple[dict[str, str], tuple[str, ...], float]]] = [
        ("Which of this need exist only once?", (plain, (), 0.0)),
        ("The same, over and over", (plain, CUT, 0.0)),
        (f"Keep {part} of them", (cut, (), 0.0)),
        ("A step: backward", (cut, ("g",), 0.0)),
        ("reduce_scatter", (mean, ("g",), reduce)),
        ("AdamW, on a shard", (mean, CUT, reduce)),
        ("A new piece of w", (mixed, ("w",), reduce)),
        ("all_gather", (joined, ("w",), both)),
        ("Half the memory, and no more traffic", (joined, (), both)),
    ]
    return [Instant(title, line, *rest) for line, (title, rest) in zip(said, shown, strict=True)]


def frames_of_zero1(D: int = 4) -> list[Frame]:
    """Return the frames: a step of plain data parallelism, what it wastes, and ZeRO-1's step with bytes."""
    return [
        Frame(_draw(instant, D), f"{instant.title.rstrip('?')}. {describe(instant, D)}", instant.caption)
        for instant in _instants(D)
    ]


def describe(instant: Instant, D: int) -> str:
    """Return what every rank holds at a moment, in words."""
    words = {
        WHOLE: "whole and the same on every rank",
        OWN: "whole, of each rank's own data",
        SHARD: f"a shard of 1/{D} on each rank",
        MEAN: f"whole; the mean over all ranks in each rank's own 1/{D}, of no more use in the rest",
        MIXED: f"new in each rank's own 1/{D}, old in the rest",
        JOINED: "whole and new, every part from the rank that owns it",
    }
    by_way: dict[str, list[str]] = {}
    for kind, way in instant.held.items():
        by_way.setdefault(way, []).append(kind)
    held = "; ".join(f"{', '.join(kinds)}: {words[way]}" for way, kinds in by_way.items())
    framed = f" Marked: {', '.join(instant.framed)}." if instant.framed else ""
    return f"{held}.{framed} {'. '.join(_bytes(instant, D))}."


def _bytes(instant: Instant, D: int) -> tuple[str, str]:
    kept = f"A rank keeps {bytes_on_a_rank(instant.held, D):g} B per parameter"
    return kept, f"It has sent {instant.sent:g} B per parameter"


def _draw(instant: Instant, D: int) -> Figure:
    def paint(axes: Axes, top: float) -> None:
        left = MARGIN + NAMES
        for kind, size in KINDS.items():
            across = size * SCALE
            put(axes, left + across / 2, top, kind, "center", True)
            put(axes, left + across / 2, top + 15, f"{size} B", "center", color=MUTED)
            for rank in range(D):
                _strip(axes, left, top + 36 + STEP * rank, across, instant.held[kind], rank, D)
            if kind in instant.framed:
                box(axes, left - 2.5, top + 33, across + 5, STEP * (D - 1) + HIGH + 6, "none", lw=2.0, ec=ACCENT)
            left += across + GAP
        for rank in range(D):
            put(axes, MARGIN, top + 42 + STEP * rank, f"DP {rank}", bold=True)
        for row, line in enumerate(_bytes(instant, D)):
            put(axes, MARGIN, top + 46 + 18 * row + STEP * D, line, size=TEXT, bold=True)

    return card(instant.title, "", (82 + STEP * D, paint))


def _strip(axes: Axes, x: float, y: float, across: float, way: str, rank: int, D: int) -> None:
    """Paint one kind on one rank, as its way says."""
    part = across / D
    if way in (WHOLE, MIXED):
        box(axes, x, y, across, HIGH, ALIKE)
    elif way == OWN:
        box(axes, x, y, across, HIGH, dp_colour(rank))
    elif way == JOINED:
        for owner in range(D):
            box(axes, x + owner * part, y, part, HIGH, dp_colour(owner))
    if way in (SHARD, MIXED):
        box(axes, x + rank * part, y, part, HIGH, dp_colour(rank))
    if way == MEAN:
        box(axes, x, y, across, HIGH, mix(dp_colour(rank), CARD, 0.75))
        for source in range(D):
            box(axes, x + rank * part, y + source * HIGH / D, part, HIGH / D, dp_colour(source))
    edge = {"ec": INK, "lw": 0.8} if way != SHARD else {"ec": MUTED, "lw": 0.8, "ls": (0, (2, 2))}
    box(axes, x, y, across, HIGH, "none", **edge)


# ---- Still pictures: each returns the figure, and its description ------------------------------------------


def kept_by_stage(D: int) -> dict[str, dict[str, float]]:
    """Return the bytes per parameter that one of D ranks keeps, by stage: bf16 weights, the rest float32."""
    whole, cut = {"masters": 4, "m": 4, "v": 4}, {"masters": 4 / D, "m": 4 / D, "v": 4 / D}
    return {
        "plain data parallelism": {"parameters": 2, "gradients": 4, **whole},
        "ZeRO-1": {"parameters": 2, "gradients": 4, **cut},
        "ZeRO-2": {"parameters": 2, "gradients": 4 / D, **cut},
        "ZeRO-3, as in FSDP2": {"parameters": 0, "gradients": 4 / D, **cut},
    }


def draw_kept(D: int) -> tuple[Figure, str]:
    """Draw what a rank keeps per parameter, stage by stage."""
    rows, title = kept_by_stage(D), f"Bytes kept per parameter, D = {D}"
    return draw_bars(rows, title), describe_bars(rows, title)


def draw_sent(D: int, once: Mapping[str, float], four_times: Mapping[str, float]) -> tuple[Figure, str]:
    """Draw what a rank sends per parameter, {stage: bytes}, with one micro-batch and with four."""
    rows = {stage: {"1 micro-batch": once[stage], "4 micro-batches": four_times[stage]} for stage in once}
    title = f"Bytes sent per parameter and step, D = {D}"
    return draw_bars(rows, title, grouped=True), describe_bars(rows, title)
