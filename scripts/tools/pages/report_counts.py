"""From 0.57 to 1.71, in frames: one report's two runs counted in six ways, each one change from the one before.

Durations are those of the run's public traces (book/results/report_traces.json), bytes those that our map plans for
its five matrices (`measure.reported`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Ellipse

from muonbook.figures.player import Frame
from muonbook.figures.style import CARD, INK, MARGIN, MUTED, OPTIMIZERS, ROW, SMALL, TEXT, TITLE, WIDTH, Block
from muonbook.measure import reported

from muonbook.figures.style import box, card, in_bytes, ink_on, mix, put, text_block, wide, wrapped  # isort: skip

MUON, ADAMW = "trace_muon_FULLSTEP_dp2_tp2", "trace_adamw_FULLSTEP"
GRID, ADAMWS_GRID = (2, 2), (4, 1)
ONCE, AGAIN, SENDING, WAITING = "counted", "counted again", "sending", "waiting"
OVER, LEFT_OUT, REST, EVERYTHING = "momentum over ", "the rest: left out", "the rest", "everything"
OVER_DP, OVER_TP = f"{OVER}DP", f"{OVER}TP"
ACROSS = WIDTH - 2 * MARGIN  # what stands for 1
THICK, GAP, STONES = 26.0, 8.0, 64.0  # a bar; below it; the row of stones
PAIR = 2 * (ROW + THICK + GAP)  # both bars, with a line above each
Parts = Mapping[str, float]


class WayToCount(NamedTuple):
    """One way to count. muon, adamw: {part: amount} of each side, in `unit`; of: what each side's bar is of.

    stone: the way in a word; change: what it changes; told: what to think of it. ranks: the ratio rank by rank.
    whole: the amount that 1 stands for; 0: all that was counted of AdamW. digits: of the ratio as it is written.
    """

    stone: str
    title: str
    change: str
    told: str
    of: tuple[str, str]
    muon: Parts
    adamw: Parts
    unit: str = "B"
    whole: float = 0.0
    digits: int = 2
    ranks: Parts | None = None

    @property
    def bar(self) -> float:
        """The amount that the whole width stands for."""
        return self.whole or _counted(self.adamw)

    @property
    def ratio(self) -> float:
        """What comes out: Muon over AdamW, of all that was counted."""
        return _counted(self.muon) / _counted(self.adamw)

    @property
    def written(self) -> str:
        """The ratio as it is written."""
        return f"{self.ratio:.{self.digits}f}"

    @property
    def sides(self) -> list[tuple[str, str, Parts]]:
        """Both bars: the optimizer, what its bar is of, and the parts."""
        return [("Muon", self.of[0], self.muon), ("AdamW", self.of[1], self.adamw)]

    def amount(self, side: Parts) -> str:
        """Return what was counted of a side, with its unit."""
        return in_bytes(_counted(side)) if self.unit == "B" else f"{_counted(side):.1f} {self.unit}"


def ways(found: Mapping[str, Any]) -> list[WayToCount]:
    """Return the six ways. found: report_traces.json."""
    traces, runs = found["traces"], {run["run"]: run for run in found["runs"]}
    steps, all_reduces = reported.steps(*GRID), reported.all_reduces(ADAMWS_GRID[0])
    names = ("gathers", "over_tp", "muon", "adamw")
    gathers, over_tp, muon, adamw = (fmean(getattr(row, name) for row in steps) for name in names)
    momentum = {OVER_DP: gathers - over_tp, OVER_TP: over_tp}
    step, calls = {REST: muon - gathers, **momentum}, {LEFT_OUT: muon - gathers, **momentum}
    grid, adamws_grid = (f"DP {dp}{f' × TP {tp}' * (tp > 1)}" for dp, tp in (GRID, ADAMWS_GRID))
    muon_0, adamw_0 = traces[f"{MUON}_rank0"], traces[f"{ADAMW}_rank0"]
    on_rank_0 = (f"{grid}, rank 0", f"{adamws_grid}, rank 0")
    inflated = [trace["name_matched_ms"] / trace["communication_ms"] for trace in (muon_0, adamw_0)]
    events = WayToCount(
        "events",
        "Events by name, in milliseconds",
        "every event that names a collective, on rank 0",
        "Every collective leaves several events: operator, annotation, kernel. All of them count.",
        on_rank_0,
        _by_name(muon_0),
        _by_name(adamw_0),
        "ms",
    )
    return [
        events,
        WayToCount(
            "kernels",
            "Kernels alone, in milliseconds",
            "each collective once",
            "Both bars lose their hatched part, and the ratio hardly moves: Muon had been counted "
            f"{inflated[0]:.2f} times, AdamW {inflated[1]:.2f} times.",
            on_rank_0,
            {ONCE: muon_0["communication_ms"]},
            {ONCE: adamw_0["communication_ms"]},
            "ms",
            digits=3,
        ),
        WayToCount(
            "ranks",
            "The kernels of all ranks, in milliseconds",
            "all four ranks; waiting is for the last to come",
            "",
            (f"{grid}, mean of all", f"{adamws_grid}, mean of all"),
            _kernels(runs[MUON]),
            _kernels(runs[ADAMW]),
            "ms",
            ranks={who: ratio for who, ratio in by_rank(found).items() if who.startswith("rank ")},
        ),
        WayToCount(
            "bytes",
            "The same calls, in bytes",
            "bytes instead of milliseconds, a part beside a whole",
            "DP, TP: momentum. Left out: Muon's gradients and parameters, which that run never sent.",
            (f"{grid}, one part", f"{adamws_grid}, whole step"),
            calls,
            {EVERYTHING: all_reduces},
        ),
        WayToCount(
            "step",
            "Muon's whole step, in bytes",
            "Muon's rest, gradients and parameters, is counted too",
            f"It looks like {events.written} confirmed. But AdamW stands on another grid.",
            (f"{grid}, whole step", f"{adamws_grid}, whole step"),
            step,
            {EVERYTHING: all_reduces},
            digits=3,
        ),
        WayToCount(
            "grid",
            "Both on Muon's grid, in bytes",
            "AdamW moves to Muon's grid, and its bar shrinks",
            "AdamW sends as much as Muon's rest. Momentum comes on top, most of it over TP. (Planned with ZeRO-1, "
            "never run.)",
            (f"{grid}, whole step", f"{grid}, whole step"),
            step,
            {EVERYTHING: adamw},
            whole=all_reduces,
        ),
    ]


def _by_name(trace: Mapping[str, Any]) -> Parts:
    return {ONCE: trace["communication_ms"], AGAIN: trace["name_matched_ms"] - trace["communication_ms"]}


def _kernels(run: Mapping[str, Any]) -> Parts:
    return {SENDING: run["transfer_ms"], WAITING: run["communication_ms"] - run["transfer_ms"]}


def _counted(side: Parts) -> float:
    return sum(value for part, value in side.items() if part != LEFT_OUT)


def by_rank(found: Mapping[str, Any]) -> dict[str, float]:
    """Return Muon / AdamW, of milliseconds in kernels: rank by rank, on the mean of all, and that without waiting."""
    ranks = range(4)
    muon, adamw = (
        [found["traces"][f"{name}_rank{rank}"]["communication_ms"] for rank in ranks] for name in (MUON, ADAMW)
    )
    sending = {run["run"]: run["transfer_ms"] for run in found["runs"]}
    ratios = {f"rank {rank}": muon[rank] / adamw[rank] for rank in ranks}
    return {**ratios, "all four": sum(muon) / sum(adamw), "all four, less waiting": sending[MUON] / sending[ADAMW]}


# ---- The frames -------------------------------------------------------------------------------------------


def frames_of_ways(counted: Sequence[WayToCount]) -> list[Frame]:
    """Return a frame for every way: results so far in a row of stones, and below it the bars behind the present one."""
    title = f"{counted[0].written}, count by count"
    below = max(_below(way)[0] for way in counted)
    frames = []
    for now, way in enumerate(counted):
        blocks = [_stones(counted, now), text_block(way.title, TEXT), _bars(way), (below, _below(way)[1])]
        row = ", ".join(each.written for each in counted[: now + 1])
        alt = f"{title}: {row}. Count {now + 1} of {len(counted)}, {_describe(way)}"
        frames.append(Frame(card(title, "", *blocks), alt, f"{way.written}: {way.change}."))
    return frames


def _describe(way: WayToCount) -> str:
    """Return in words what a frame shows: both bars with their parts, and the ratio, or one for every rank."""
    told = []
    for name, of, side in way.sides:
        parts = ", ".join(f"{part} {value / way.bar:.3f}" for part, value in side.items())
        told.append(f"{name} ({of}) {way.amount(side)}, of the width {parts}")
    ranks = [f"{who} {ratio:.3f}" for who, ratio in (way.ranks or {}).items()]
    asked = f" Rank by rank: {', '.join(ranks)}; mean {way.ratio:.3f}." if ranks else ""
    return f"{way.title}: {'; '.join(told)}; Muon / AdamW {way.written}.{asked} {way.told}".rstrip()


def _stones(counted: Sequence[WayToCount], now: int) -> Block:
    pitch = ACROSS / len(counted)

    def paint(axes: Axes, top: float) -> None:
        y, pale = top + 22, mix(MUTED, CARD, 0.72)
        places = [MARGIN + pitch * (n + 0.5) for n in range(len(counted))]
        axes.plot([places[0], places[now]], [y, y], color=INK, lw=1.6, zorder=1)
        axes.plot([places[now], places[-1]], [y, y], color=pale, lw=1.6, ls=(0, (2, 2)), zorder=1)
        for n, (way, x) in enumerate(zip(counted, places, strict=True)):
            size, across, high = (TITLE, 57, 36) if n == now else (SMALL, 44, 27)
            fill, edge = (INK, INK) if n == now else (mix(MUTED, CARD, 0.8), INK) if n < now else (CARD, pale)
            axes.add_patch(Ellipse((x, y), across, high, fc=fill, ec=edge, lw=1.2, gid=f"stone-{n}"))
            colour = ink_on(fill) if n <= now else MUTED
            put(axes, x, y - 0.51 * size, way.written if n <= now else "?", "center", n == now, color=colour, size=size)
            put(axes, x, y + 21, way.stone, "center", color=INK if n == now else MUTED)

    return STONES, paint


def _look(optimizer: str, part: str) -> dict[str, Any]:
    """Return how a part of an optimizer's bar is painted."""
    colour = OPTIMIZERS[optimizer]["color"]
    dashed = {"ec": colour, "lw": 1.4, "ls": (0, (3, 2))}
    return {
        AGAIN: {"fc": CARD, "hatch": "/////", "ec": colour, "lw": 0.8},
        WAITING: {"fc": mix(colour, CARD, 0.6)},
        LEFT_OUT: {"fc": CARD, **dashed},
        REST: {"fc": mix(colour, CARD, 0.55), **dashed},
        OVER_TP: {"fc": mix(colour, INK, 0.45)},
    }.get(part, {"fc": colour})


def _bars(way: WayToCount) -> Block:
    """Return Muon's bar over AdamW's, on a track as long as 1; where AdamW's is shorter, a guide at its end."""
    scale = ACROSS / way.bar

    def paint(axes: Axes, top: float) -> None:
        y = top
        for name, of, side in way.sides:
            put(axes, MARGIN, y, name, bold=True)
            amount = way.amount(side)
            put(axes, WIDTH - MARGIN - wide(amount) - 7, y, of, "right", color=MUTED)
            put(axes, WIDTH - MARGIN, y, amount, "right", True)
            box(axes, MARGIN, y + ROW, ACROSS, THICK, mix(MUTED, CARD, 0.9))
            x = MARGIN
            for part, value in side.items():
                look = _look(name, part)
                box(axes, x, y + ROW, scale * value, THICK, CARD, gid=f"{name}-{part}", **look)
                _label(axes, x, y + ROW, scale * value, part, look)
                x += scale * value
            y += ROW + THICK + GAP
        end = MARGIN + scale * _counted(way.adamw)
        if way.whole:
            axes.vlines([end], top + ROW - 3, top + PAIR - GAP + 3, INK, lw=1.2, gid="guide")

    return PAIR, paint


def _label(axes: Axes, x: float, y: float, width: float, part: str, look: Mapping[str, Any]) -> None:
    """Name a part of a bar inside it, if there is room; on hatches over a patch of the card."""
    part = part.removeprefix(OVER)
    long = wide(part, bold=False)
    if long + 6 > width:
        return
    if "hatch" in look:
        box(axes, x + (width - long) / 2 - 3, y + 5, long + 6, THICK - 10, CARD)
    put(axes, x + width / 2, y + THICK / 2 - 5.7, part, "center", color=ink_on(look["fc"]))


def _below(way: WayToCount) -> Block:
    """Return what stands below the bars: one dot per rank where there are any, or else what to think of this count."""
    if way.ranks is not None:
        return _dots(way.ranks, way.ratio)
    rows = wrapped(way.told, ACROSS, TEXT)

    def paint(axes: Axes, top: float) -> None:
        for n, row in enumerate(rows):
            put(axes, MARGIN, top + GAP + 1.4 * TEXT * n, row, color=MUTED, size=TEXT)

    return GAP + 1.4 * TEXT * len(rows), paint


def _dots(ranks: Parts, mean: float) -> Block:
    """Return a dot per rank, on the scale of the bars, each named on the side away from the mean."""

    def paint(axes: Axes, top: float) -> None:
        middle, low = MARGIN + ACROSS * mean, top + GAP + ROW * len(ranks)
        starts, ends = (top - PAIR + ROW + THICK, top - GAP), (top - GAP - THICK, low)  # not across AdamW's bar
        axes.vlines([middle] * 2, starts, ends, INK, linestyles=(0, (3, 2)), lw=1.2, gid="mean")
        for n, (who, ratio) in enumerate(ranks.items()):
            x, y = MARGIN + ACROSS * ratio, top + GAP + ROW * (n + 0.5)
            axes.hlines([y], x, middle, INK, lw=1.2)
            axes.plot([x], [y], "o", color=INK, ms=7, gid=f"dot-{who}")
            side, ha = (9, "left") if ratio > mean else (-9, "right")
            put(axes, x + side, y - 6.5, f"{who}  {ratio:.3f}", ha)
        put(axes, middle + 6, low - 1.5 * ROW + 1.5, f"mean  {mean:.3f}", bold=True)

    return GAP + ROW * len(ranks), paint
