"""Three schedules of Muon's step, one under the other: what is on the wire, and what is worked on meanwhile.

A sketch: the order of starts and waits is that of `distmuon.optim.overlap`, the durations are made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distmuon.optim.overlap import OVERLAPS
from muonbook.ch14.figure_timeline import KINDS
from muonbook.figures.plots import head, part_key
from muonbook.figures.style import CARD, INK, MARGIN, MUTED, ROW, WIDTH, Block, box, card, ink_on, mix, put

BUCKETS = 4
DURATIONS = {"gather": 0.5, "work": 1.0, "parameters": 0.5}
LANES = {"gather": "wire", "work": "work", "parameters": "wire"}
LOOKS = {  # kind -> how the key calls it, its colour in timelines
    "gather": ("gather", KINDS["gathers of momentum"][0]),
    "work": ("work (Newton–Schulz)", KINDS["Newton–Schulz"][0]),
    "parameters": ("parameters", KINDS["ZeRO-1's moves"][0]),
}
NOTE = (
    "A sketch, no measurement: four buckets, time to the right. A gather and a publication of parameters each take "
    "half as long as the work here. 100 %: synchronous."
)
LABELS, HIGH, PITCH = 38.0, 19.0, 22.0  # room for a lane's name; how high a lane is; from one to the next
ACROSS = WIDTH - 2 * MARGIN - LABELS


class TimedBlock(NamedTuple):
    """What a lane does for one bucket, from start to end. kind: of `DURATIONS`."""

    kind: str
    bucket: int
    start: float
    end: float


class TwoLanes:
    """A rank's work, and a wire that does one thing at a time, in the order in which the rank starts them."""

    def __init__(self, durations: Mapping[str, float]) -> None:
        self.durations = durations
        self.free = {"wire": 0.0, "work": 0.0}  # since when; the rank starts things when its own lane is free
        self.blocks: list[TimedBlock] = []

    def start(self, kind: str, bucket: int) -> TimedBlock:
        """Begin a block as soon as its lane is free, and not before the rank gets there."""
        begin = max(self.free[LANES[kind]], self.free["work"])
        self.blocks.append(block := TimedBlock(kind, bucket, begin, begin + self.durations[kind]))
        self.free[LANES[kind]] = block.end
        return block

    def wait(self, block: TimedBlock) -> None:
        """Let the rank begin nothing before this has ended."""
        self.free["work"] = max(self.free["work"], block.end)


def blocks(schedule: str, durations: Mapping[str, float] = DURATIONS, count: int = BUCKETS) -> list[TimedBlock]:
    """Return all blocks of one of `OVERLAPS`, for `count` buckets, in the order in which they are started.

    Raises ValueError for any other name.
    """
    lanes, buckets = TwoLanes(durations), range(count)
    if schedule == "synchronous":
        for bucket in buckets:
            lanes.wait(lanes.start("gather", bucket))
            lanes.start("work", bucket)
            lanes.wait(lanes.start("parameters", bucket))
    elif schedule == "naive":
        for gather in [lanes.start("gather", bucket) for bucket in buckets]:
            lanes.wait(gather)
        for kind in ("work", "parameters"):
            for bucket in buckets:
                lanes.start(kind, bucket)
    elif schedule == "pipelined":
        ahead = lanes.start("gather", 0)
        for bucket in buckets:
            lanes.wait(ahead)
            if bucket + 1 < count:
                ahead = lanes.start("gather", bucket + 1)
            lanes.start("work", bucket)
            lanes.start("parameters", bucket)
    else:
        raise ValueError(f"schedules are {', '.join(OVERLAPS)}; not {schedule!r}.")
    return lanes.blocks


def length(schedule: str, durations: Mapping[str, float] = DURATIONS, count: int = BUCKETS) -> float:
    """Return when the last block of a schedule ends. durations: of `DURATIONS`' kinds; count: buckets."""
    return max(block.end for block in blocks(schedule, durations, count))


def draw_schedules(title: str = "") -> Figure:
    """Draw the schedules on one scale, the wire above the work, each with its share of the synchronous length."""
    key = part_key({name: (colour, "") for name, colour in LOOKS.values()})
    return card(title, NOTE, *key, *(_schedule(name) for name in OVERLAPS))


def describe_schedules(title: str = "") -> str:
    """Return alt text for `draw_schedules`: how long each schedule is, and what is on the wire during which work."""
    told = []
    for name in OVERLAPS:
        sent, hidden = [block for block in blocks(name) if LANES[block.kind] == "wire"], []
        for work in (block for block in blocks(name) if block.kind == "work"):
            under = [f"{b.kind} {b.bucket}" for b in sent if b.start < work.end and work.start < b.end]
            hidden += [f"{' and '.join(under)} under work {work.bucket}"] * bool(under)
        told.append(f"{name}, {_share(name)} of the synchronous length: {', '.join(hidden) or 'nothing overlaps'}")
    return f"{head(title, 'Three schedules of a step')} {NOTE} {'; '.join(told)}."


def empty_lanes(
    axes: Axes, top: float, name: str, told: str, lanes: Iterable[str], across: float
) -> dict[str, float]:  # fmt: skip
    """Write a name, `told` where time ends, and below an empty strip for every lane; return each strip's upper edge.

    across: how long the strips are. They begin after `LABELS`, `HIGH` points high, `PITCH` from one to the next.
    """
    left = MARGIN + LABELS
    put(axes, MARGIN, top + 8, name, bold=True)
    put(axes, left + across, top + 8, told, "right", bold=True)
    rows = {lane: top + 12 + ROW + PITCH * n for n, lane in enumerate(lanes)}
    for lane, y in rows.items():
        put(axes, MARGIN, y + 4, lane, color=MUTED)
        box(axes, left, y, across, HIGH, mix(MUTED, CARD, 0.88))
    return rows


def _share(schedule: str) -> str:
    return f"{100 * length(schedule) / length('synchronous'):.0f} %"


def _schedule(name: str) -> Block:
    left, scale = MARGIN + LABELS, ACROSS / max(map(length, OVERLAPS))
    end = left + scale * length(name)

    def paint(axes: Axes, top: float) -> None:
        rows = empty_lanes(axes, top, name, _share(name), ("wire", "work"), end - left)
        for kind, bucket, start, stop in blocks(name):
            x, y, colour = left + scale * start, rows[LANES[kind]], LOOKS[kind][1]
            box(axes, x, y, scale * (stop - start), HIGH, colour, ec=CARD, lw=1.0, gid=f"{name}-{kind}-{bucket}")
            put(axes, x + scale * (stop - start) / 2, y + 4.5, str(bucket), "center", bold=True, color=ink_on(colour))
        axes.vlines([end], rows["wire"] - 3, rows["work"] + HIGH + 3, mix(INK, CARD, 0.5), lw=1.0)

    return 12 + ROW + PITCH + HIGH + 4, paint
