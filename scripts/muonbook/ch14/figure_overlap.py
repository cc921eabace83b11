"""Why summed durations grow while a step shrinks, in frames: gathers that share a wire, and work that hides them.

A sketch: durations are made up, and all gathers under way get equal parts of the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from matplotlib.axes import Axes

from muonbook.ch14.figure_schedules import BUCKETS, HIGH, LABELS, LOOKS
from muonbook.figures.player import Frame
from muonbook.figures.plots import part_key
from muonbook.figures.style import CARD, INK, MARGIN, MUTED, ROW, WIDTH, Block, box, card, ink_on, mix, put
from muonbook.measure.trace_report import Interval, hull, intersection, length

GATHER = WORK = 1.0  # how long a gather takes that has the wire to itself, and the work on a bucket
COUNTED = {  # number of a `trace_report.Summary` -> how the chapter calls it
    "communication_sum": "durations, summed",
    "communication": "the same, as a union",
    "span": "first start to last end",
}
TITLE = "The sum grows, the step shrinks"
NOTE = (
    f"A sketch, no measurement: {BUCKETS} buckets. A gather with the wire to itself takes {GATHER:g}, and so does the "
    "work on a bucket. Dashed: the first frame."
)
WIRE, BAR, LEFT = 32.0, 17.0, MARGIN + LABELS  # how high the wire is, and a bar; where time begins


class OverlapScene(NamedTuple):
    """One frame: how many gathers start at once, and whether the next ones start before the work on these."""

    at_once: int
    ahead: bool
    head: str
    caption: str


SCENES = (
    OverlapScene(
        1,
        False,
        "Wire and work take turns",
        "One gather, then its work. Nothing overlaps, so sum and union agree: {communication_sum:g}.",
    ),
    OverlapScene(
        2,
        False,
        "Two share the wire: each takes twice as long",
        "The same bytes, the same union, the same step. Only the sum has grown, to {communication_sum:g}: both "
        "durations count in full.",
    ),
    OverlapScene(
        2,
        True,
        "The next two travel under work",
        "The sum stays {communication_sum:g}. But {hidden:g} of the wire's {communication:g} now pass under work, and "
        "the step takes {span:g}.",
    ),
)


class RankAndWire:
    """A rank that does one thing at a time, and a wire of which all its gathers under way get equal parts."""

    def __init__(self) -> None:
        self.now = 0.0
        self.left: dict[int, float] = {}  # bucket -> how long its gather would still take alone
        self.sent: dict[int, Interval] = {}
        self.worked: dict[int, Interval] = {}

    def start(self, bucket: int) -> None:
        """Put a bucket's gather on the wire."""
        self.left[bucket] = GATHER
        self.sent[bucket] = (self.now, self.now)

    def wait(self, bucket: int) -> None:
        """Let time pass until a bucket's gather has ended."""
        while bucket in self.left:
            self._pass(self._next_end())

    def work(self, bucket: int) -> None:
        """Work on a bucket, while the wire goes on."""
        begin, end = self.now, self.now + WORK
        while self.now < end:
            self._pass(min(end - self.now, self._next_end()))
        self.worked[bucket] = (begin, end)

    def _next_end(self) -> float:
        return min((len(self.left) * left for left in self.left.values()), default=inf)

    def _pass(self, time: float) -> None:
        """Let so much time pass, at most until the next gather ends."""
        self.now += time
        for bucket in self.left:
            self.sent[bucket] = (self.sent[bucket][0], self.now)
        share = time / max(len(self.left), 1)
        self.left = {bucket: left - share for bucket, left in self.left.items() if left > share}


def timed(scene: OverlapScene) -> RankAndWire:
    """Return the rank after a step: when each bucket was sent and worked on."""
    rank = RankAndWire()
    groups = [range(BUCKETS)[first : first + scene.at_once] for first in range(0, BUCKETS, scene.at_once)]
    upcoming = iter(groups)

    def start_next() -> None:
        for bucket in next(upcoming, ()):
            rank.start(bucket)

    start_next()
    for group in groups:
        for bucket in group:
            rank.wait(bucket)
        if scene.ahead:
            start_next()
        for bucket in group:
            rank.work(bucket)
        if not scene.ahead:
            start_next()
    return rank


def counted(rank: RankAndWire) -> dict[str, float]:
    """Return what a reader of the rank's trace may count, by the keys of `COUNTED`."""
    sent = rank.sent.values()
    first, last = hull([*sent, *rank.worked.values()])
    return {
        "communication_sum": sum(end - begin for begin, end in sent),
        "communication": length(sent),
        "span": last - first,
    }


def hidden(rank: RankAndWire) -> float:
    """Return for how long the rank worked while something was on the wire."""
    return length(intersection(rank.sent.values(), rank.worked.values()))


def frames_of_overlap() -> list[Frame]:
    """Return a frame for each of `SCENES`: its timeline, and what may be counted in it, beside that of the first."""
    ranks = [timed(scene) for scene in SCENES]
    before = counted(ranks[0])
    scale = (WIDTH - MARGIN - LEFT) / max(value for rank in ranks for value in counted(rank).values())
    key = part_key({LOOKS[kind][0]: (LOOKS[kind][1], "") for kind in ("gather", "work")})
    frames = []
    for scene, rank in zip(SCENES, ranks, strict=True):
        figure = card(TITLE, NOTE, *key, _timeline(scene.head, rank, scale), _bars(rank, before, scale))
        caption = scene.caption.format(**counted(rank), hidden=hidden(rank))
        frames.append(Frame(figure, _describe(scene.head, rank, before), caption))
    return frames


def _describe(head: str, rank: RankAndWire, before: Mapping[str, float]) -> str:
    parts = [
        f"{kind} {bucket} from {begin:g} to {end:g}"
        for kind, blocks in (("gather", rank.sent), ("work", rank.worked))
        for bucket, (begin, end) in blocks.items()
    ]
    told = [f"{COUNTED[key]}: {_beside(value, before[key])}" for key, value in counted(rank).items()]
    return f"{TITLE}. {NOTE} {head}. {', '.join(parts)}. {'; '.join(told)}; gathers under work: {hidden(rank):g}."


def _beside(value: float, before: float) -> str:
    return f"{value:g}" if value == before else f"{value:g}, was {before:g}"


def _timeline(head: str, rank: RankAndWire, scale: float) -> Block:
    across = scale * counted(rank)["span"]

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 8, head, bold=True)
        wire = top + 12 + ROW
        work = wire + WIRE + 3
        for lane, y, high in (("wire", wire, WIRE), ("work", work, HIGH)):
            put(axes, MARGIN, y + high / 2 - 6, lane, color=MUTED)
            box(axes, LEFT, y, across, high, mix(MUTED, CARD, 0.88))
        drawn: list[tuple[Interval, float]] = []
        for bucket, when in rank.sent.items():
            high = WIRE * GATHER / (when[1] - when[0])  # its part of the wire: of two equal gathers areas are equal
            y = wire + sum(above for other, above in drawn if intersection([other], [when]))
            _block(axes, f"gather-{bucket}", LOOKS["gather"][1], when, y, high, scale)
            drawn.append((when, high))
        for bucket, when in rank.worked.items():
            _block(axes, f"work-{bucket}", LOOKS["work"][1], when, work, HIGH, scale)
        axes.vlines([LEFT + across], wire - 3, work + HIGH + 3, mix(INK, CARD, 0.5), lw=1.0)

    return 12 + ROW + WIRE + 3 + HIGH + 4, paint


def _bars(rank: RankAndWire, before: Mapping[str, float], scale: float) -> Block:
    pitch, after = ROW + BAR + 9, counted(rank)

    def paint(axes: Axes, top: float) -> None:
        for key, value in after.items():
            put(axes, LEFT, top + 8, COUNTED[key])
            put(axes, WIDTH - MARGIN, top + 8, _beside(value, before[key]), "right", bold=True)
            y, colour = top + 8 + ROW, LOOKS["gather"][1] if key != "span" else MUTED
            box(axes, LEFT, y, scale * value, BAR, colour, gid=f"bar-{COUNTED[key]}")
            if key == "communication_sum":
                _end_to_end(axes, y, rank.sent, scale)
            if after != before:
                dashes = {"ec": INK, "lw": 1.2, "ls": (0, (3, 2))}
                box(axes, LEFT, y, scale * before[key], BAR, "none", gid=f"before-{COUNTED[key]}", **dashes)
            top += pitch

    return pitch * len(COUNTED), paint


def _end_to_end(axes: Axes, y: float, sent: Mapping[int, Interval], scale: float) -> None:
    """Paint the gathers one behind the other, as a sum counts them."""
    so_far = 0.0
    for bucket, (begin, end) in sent.items():
        when = (so_far, so_far + end - begin)
        _block(axes, f"summed-{bucket}", LOOKS["gather"][1], when, y, BAR, scale)
        so_far = when[1]


def _block(axes: Axes, gid: str, colour: str, when: Interval, y: float, high: float, scale: float) -> None:
    """Paint a block with its bucket, the last part of `gid`."""
    x, across = LEFT + scale * when[0], scale * (when[1] - when[0])
    box(axes, x, y, across, high, colour, ec=CARD, lw=1.0, gid=gid)
    put(axes, x + across / 2, y + high / 2 - 5, gid.split("-")[1], "center", bold=True, color=ink_on(colour))
