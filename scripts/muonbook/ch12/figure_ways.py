"""Four ways to count one and the same run, as pairs of bars: what each counts, what it leaves out, and its ratio.

The run is the one behind "0.57 times": durations are those of its public traces (book/results/report_traces.json),
bytes those that our map plans for its five matrices (`measure.reported`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.style import CARD, INK, MARGIN, MUTED, OPTIMIZERS, ROW, SMALL, WIDTH, Block
from muonbook.measure import reported

from muonbook.figures.style import box, card, mix, put, wrapped  # isort: skip

NAMES, THICK, HEAD = 54.0, 13.0, 20.0  # room for a bar's name; a bar; the line above a pair
MUON, ADAMW = "trace_muon_FULLSTEP_dp2_tp2", "trace_adamw_FULLSTEP"
GRID, ADAMWS_GRID = (2, 2), (4, 1)
SENT, WAITED, AGAIN, LEFT_OUT = "counted", "counted, but waiting", "counted again", "of the step, left out"
Parts = Mapping[str, float]


class WayToCount(NamedTuple):
    """One way to count. muon, adamw: {part: amount} of each side, in a unit of its own; told: what it takes in.

    whole: the amount that a bar of AdamW's usual length stands for; 0: all that was counted of AdamW.
    """

    title: str
    told: str
    muon: Parts
    adamw: Parts
    whole: float = 0.0

    @property
    def bar(self) -> float:
        """The amount that one bar stands for."""
        return self.whole or _counted(self.adamw)

    @property
    def ratio(self) -> float:
        """What comes out: Muon over AdamW, of all that was counted."""
        return _counted(self.muon) / _counted(self.adamw)


def ways(found: Mapping[str, Any]) -> list[WayToCount]:
    """Return the four ways. found: report_traces.json."""
    traces, runs = found["traces"], {run["run"]: run for run in found["runs"]}
    steps, all_reduces = reported.steps(*GRID), reported.all_reduces(ADAMWS_GRID[0])
    gathers, muon, adamw = (fmean(getattr(row, name) for row in steps) for name in ("gathers", "muon", "adamw"))
    return [
        WayToCount(
            "Events by name, milliseconds",
            "Rank 0. Operator, annotation and kernel of a collective are added up: the double counting nearly cancels.",
            _by_name(traces[f"{MUON}_rank0"]),
            _by_name(traces[f"{ADAMW}_rank0"]),
        ),
        WayToCount(
            "Kernels alone, milliseconds",
            "Mean over four ranks, each collective once. A kernel that waits for a slow peer sends nothing.",
            _kernels(runs[MUON]),
            _kernels(runs[ADAMW]),
        ),
        WayToCount(
            "The same calls, bytes",
            "Muon's momentum gathers on DP 2 × TP 2, beside all of AdamW's gradients on DP 4.",
            {SENT: gathers, LEFT_OUT: muon - gathers},
            {SENT: all_reduces},
        ),
        WayToCount(
            "A whole step, bytes",
            "Planned, never run: both with ZeRO-1 on DP 2 × TP 2, on panel 3's scale; Muon's is flat.",
            {SENT: muon},
            {SENT: adamw},
            all_reduces,
        ),
    ]


def _by_name(trace: Mapping[str, Any]) -> Parts:
    return {SENT: trace["communication_ms"], AGAIN: trace["name_matched_ms"] - trace["communication_ms"]}


def _kernels(run: Mapping[str, Any]) -> Parts:
    return {SENT: run["transfer_ms"], WAITED: run["communication_ms"] - run["transfer_ms"]}


def by_rank(found: Mapping[str, Any]) -> dict[str, float]:
    """Return Muon / AdamW, of milliseconds in kernels: rank by rank, on the mean of all, and that without waiting."""
    ranks = range(4)
    muon, adamw = (
        [found["traces"][f"{name}_rank{rank}"]["communication_ms"] for rank in ranks] for name in (MUON, ADAMW)
    )
    sending = {run["run"]: run["transfer_ms"] for run in found["runs"]}
    ratios = {f"rank {rank}": muon[rank] / adamw[rank] for rank in ranks}
    return {**ratios, "all four": sum(muon) / sum(adamw), "all four, less waiting": sending[MUON] / sending[ADAMW]}


def whole_steps() -> dict[str, dict[str, float]]:
    """Return {grid: {algorithm: Muon / AdamW}}, of the bytes of a whole step of the report's model, both on ZeRO-1."""
    titles = {"gather_all": "flat", "gather_cut": "flat + cut", "owner": "owner"}
    return {
        f"{dp} DP × {tp} TP": {title: reported.over_adamw(dp, tp, name) for name, title in titles.items()}
        for dp, tp in (ADAMWS_GRID, GRID)
    }


def looks(optimizer: str, part: str) -> dict[str, Any]:
    """Return how a part of an optimizer's bar is painted."""
    colour = OPTIMIZERS[optimizer]["color"]
    return {
        SENT: {"fc": colour},
        WAITED: {"fc": mix(colour, CARD, 0.6)},
        AGAIN: {"fc": CARD, "hatch": "/////", "ec": colour, "lw": 0.8},
        LEFT_OUT: {"fc": CARD, "ec": colour, "lw": 1.2, "ls": (0, (3, 2))},
    }[part]


def draw_ways(counted: Sequence[WayToCount]) -> Figure:
    """Draw a pair of bars for every way, AdamW's of one length but where another scale is asked for."""
    most = max(sum(side.values()) / way.bar for way in counted for side in (way.muon, way.adamw))
    unit = (WIDTH - 2 * MARGIN - NAMES) / most
    return card(
        "One report, counted four ways",
        "Bars are scaled to AdamW's; the last as the one before.",
        _key(),
        *(_pair(n, way, unit) for n, way in enumerate(counted, 1)),
    )


def _counted(side: Parts) -> float:
    return sum(value for part, value in side.items() if part != LEFT_OUT)


def _key() -> Block:
    places = [(MARGIN, 2.0), (MARGIN + 156, 2.0), (MARGIN, 2.0 + ROW + 2), (MARGIN + 156, 2.0 + ROW + 2)]

    def paint(axes: Axes, top: float) -> None:
        for part, (x, y) in zip((SENT, WAITED, AGAIN, LEFT_OUT), places, strict=True):
            box(axes, x, top + y + 2, 18, 10, CARD, **looks("Muon", part))
            put(axes, x + 24, top + y, part)

    return 2 * ROW + 10, paint


def _pair(number: int, way: WayToCount, unit: float) -> Block:
    rows = wrapped(way.told, WIDTH - 2 * MARGIN)
    height = HEAD + 2 * (THICK + 3) + 1.35 * SMALL * len(rows) + 14

    def paint(axes: Axes, top: float) -> None:
        axes.hlines([top], MARGIN, WIDTH - MARGIN, mix(MUTED, CARD, 0.7), lw=0.8)
        put(axes, MARGIN, top + 4, f"{number}  {way.title}", bold=True)
        put(axes, WIDTH - MARGIN, top + 4, f"{way.ratio:.2f}", "right", True)
        y, scale = top + HEAD + 2, unit / way.bar
        for name, side in (("Muon", way.muon), ("AdamW", way.adamw)):
            put(axes, MARGIN, y - 1, name, color=INK)
            x = MARGIN + NAMES
            for part, value in side.items():
                box(axes, x, y, scale * value, THICK, CARD, gid=f"way-{number}-{name}-{part}", **looks(name, part))
                x += scale * value
            y += THICK + 3
        for n, row in enumerate(rows):
            put(axes, MARGIN, y + 2 + 1.35 * SMALL * n, row, color=MUTED)

    return height, paint


def describe_ways(counted: Sequence[WayToCount]) -> str:
    """Return alt text for `draw_ways`: each way, its parts as shares of AdamW's bar, its ratio."""
    told = []
    for number, way in enumerate(counted, 1):
        sides = [
            f"{name} {', '.join(f'{part} {value / way.bar:.2f}' for part, value in side.items())}"
            for name, side in (("Muon", way.muon), ("AdamW", way.adamw))
        ]
        told.append(f"{number}, {way.title}: {'; '.join(sides)}; ratio {way.ratio:.2f}. {way.told}")
    return f"One report, counted four ways, AdamW's bar being 1, in the last the one before. {' '.join(told)}"
