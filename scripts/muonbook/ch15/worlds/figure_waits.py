"""Who waits for whom in a step of Muon: every DP rank's Newton–Schulz, bucket by bucket, as the planner adds it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.plots import head
from muonbook.figures.style import ACCENT, CARD, MARGIN, MUTED, ROW, SMALL, WIDTH, Block, box, card, mix, put
from muonbook.planner.algorithms import ALGORITHMS
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.parts.every_rank import Zero1Part
from muonbook.planner.planned_worlds import specs_of

SHOWN = ("bucketed", "flat")
FEW = 3  # buckets that are drawn, at most
HIGH = 46.0  # the longest first bucket
BETWEEN = 3.0  # buckets
NAMES = 62.0  # room for a bucket's name
WAITS = mix(MUTED, CARD, 0.75)
NOTE = "A column: a DP rank; time runs down. Red: Newton–Schulz. Grey: waits for the bucket's slowest rank."


class BucketWork(NamedTuple):
    """An algorithm's buckets. work: of each, operations by DP rank, [D]; TP ranks are alike."""

    title: str
    work: list[np.ndarray]

    @property
    def busy(self) -> float:
        """The mean rank's share of the time, for everybody waits until a bucket's slowest is done."""
        return sum(each.mean() for each in self.work) / self.longest

    @property
    def longest(self) -> float:
        """What the slowest rank of every bucket does, together."""
        return float(sum(each.max() for each in self.work))


def bucket_work(model: str, dp: int, tp: int) -> list[BucketWork]:
    """Lay a model out by every algorithm of `SHOWN`, and add up who does what of its buckets."""
    specs, indices = specs_of(MODELS[model], tp)
    found = []
    for name in SHOWN:
        part = ALGORITHMS[name].lay_out(specs, indices, dp, tp)
        assert isinstance(part, Zero1Part)
        work = [np.zeros(dp) for _ in part.world.matrices]
        for mine, (_, rows) in zip(work, part.world.matrices, strict=True):
            for row in rows:
                mine[row.slice] += row.load.flops
        found.append(BucketWork(ALGORITHMS[name].title, work))
    return found


def draw_waits(found: Sequence[BucketWork], title: str = "") -> Figure:
    """Draw the first buckets of each algorithm, all on one scale."""
    unit = max(each.work[0].max() for each in found) / HIGH
    return card(title, NOTE, *(_block(each, unit) for each in found))


def describe_waits(found: Sequence[BucketWork], title: str = "") -> str:
    """Return alt text for `draw_waits`: how many buckets there are, and how much of the time ranks work."""
    told = "; ".join(f"{_counted(each)}, at work {each.busy:.0%} of the time" for each in found)
    return f"{head(title, 'Buckets')} {told}."


def _counted(each: BucketWork) -> str:
    count, few = len(each.work), min(FEW, len(each.work))
    return f"{each.title}, {few} of {count} buckets" if few < count else f"{each.title}, all in one bucket"


def _block(each: BucketWork, unit: float) -> Block:
    heights = [work.max() / unit for work in each.work[:FEW]]

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 6, _counted(each))
        put(axes, WIDTH - MARGIN, top + 6, f"at work {each.busy:.0%}", "right", bold=True)
        y, across = top + 8 + ROW, WIDTH - 2 * MARGIN - NAMES
        for n, (work, high) in enumerate(zip(each.work, heights, strict=False)):
            put(axes, MARGIN, y + (high - SMALL) / 2, f"bucket {n}", color=MUTED)
            box(axes, MARGIN + NAMES, y, across, high, WAITS, gid=f"bucket-{each.title}-{n}")
            edges = np.linspace(MARGIN + NAMES, MARGIN + NAMES + across, len(work) + 1)
            axes.stairs(y + work / unit, edges, baseline=y, fill=True, color=ACCENT, lw=0, gid=f"work-{each.title}-{n}")
            y += high + BETWEEN

    return 8 + ROW + sum(heights) + BETWEEN * len(heights) + 6, paint
