"""Timelines: what every rank did during one step, from a trace; several traces one above the other.

Two strips per rank: above, what its main thread was at; below, its collectives, in lanes where several fly at once,
hatched while it waited for the last rank to arrive. The axis is the share of the step, for a trace shows when things
happened and not how fast they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.plots import card, head
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, MUTED, ROW, TP_HATCHES, WIDTH, Block
from muonbook.measure.trace import STEP, RankTrace, TracedCollective
from muonbook.measure.trace_report import Interval, hull, intersection, length, meetings, union

from muonbook.figures.style import box, dp_colour, mix, put  # isort: skip

NAMES, MOVES_HIGH, SENT_HIGH, GAP = 62.0, 17.0, 11.0, 7.0  # room for ranks' names; strips; between ranks
PANEL = WIDTH - 2 * MARGIN - NAMES
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {  # kind -> colour, ranges drawn in it
    "forward and backward": (mix(MUTED, CARD, 0.72), ("forward_backward",)),
    "ZeRO-1's moves": (mix(COLD, CARD, 0.05), ("reduce_scatter", "norms", "all_gather")),
    "gathers of momentum": (mix(COLD, CARD, 0.55), ("dp_gather", "tp_gather")),
    "Newton–Schulz": (ACCENT, ("newton_schulz",)),
    "elementwise": (mix(ACCENT, CARD, 0.62), ("momentum", "tp_shard", "dp_shard", "apply", "adamw")),
    "blocked in wait()": (CARD, ("wait",)),  # last, because it lies inside others
}
SENT: dict[str, tuple[str, str, str]] = {  # what a rank does in a collective -> name, colour, hatch
    "waiting": ("waiting for others", CARD, "//////"),
    "transfer": ("transfer", mix(INK, CARD, 0.15), ""),
    "unknown": ("not known which", mix(INK, CARD, 0.5), ""),
}
LANES = 3  # collectives at the same time that are drawn apart; more lie on top of each other


class Window(NamedTuple):
    """The part of a run that is drawn: from the first rank's start of a step to the last one's end. Microseconds."""

    start: float
    end: float

    def share(self, moment: float) -> float:
        return (moment - self.start) / (self.end - self.start)


def draw_timeline(
    panels: Mapping[str, Sequence[RankTrace]], step: int = 0, title: str = "", note: str = "", within: str = "",
    together: bool = False,
) -> Figure:  # fmt: skip
    """Draw one step of one or several traces.

    panels: title -> the ranks of one run, as `trace.read` returns them. within: the name, or its beginning, of a range
    that is drawn instead of the whole step. together: all panels on the scale of the longest, instead of each on its
    own. Raises ValueError for no panel, and where a trace has no such step or range.
    """
    windows, longest = _windows(panels, step, within)
    what = f"the longest{' step' * (not within)}" if together else "the part shown" if within else "the step"
    shown = set().union(*(_shown(traces, windows[name]) for name, traces in panels.items()))
    moves = [(kind, colour, "") for kind, (colour, _) in KINDS.items() if kind in shown]
    sent = [look for what, look in SENT.items() if what in shown]
    keys = {"Above, the move:": moves, "Below, collectives:": sent}
    blocks = [_key(heading, looks) for heading, looks in keys.items() if looks]
    for name, traces in panels.items():
        mine = windows[name]
        scale = PANEL * ((mine.end - mine.start) / longest if together else 1.0)
        blocks.append(_panel(name, traces, mine, scale))
    return card(title, note, *blocks, _axis(f"share of {what}"))


def describe_timeline(
    panels: Mapping[str, Sequence[RankTrace]], step: int = 0, title: str = "", within: str = "", together: bool = False,
    note: str = "",
) -> str:  # fmt: skip
    """Return alt text for `draw_timeline`: per rank, the shares of the step."""
    told = []
    windows, longest = _windows(panels, step, within)
    for name, traces in panels.items():
        mine, ranks = windows[name], []
        waits = _waits(traces)
        for trace in traces:
            sent = [c.when.interval for c in trace.collectives]
            waiting = [(c.when.start, waits[id(c)]) for c in trace.collectives if id(c) in waits]
            parts: dict[str, Sequence[Interval]] = {"in collectives": sent, "waiting in them": waiting}
            parts["in Newton–Schulz"] = ranges(trace, "Newton–Schulz")
            shares = ", ".join(f"{_covered(part, mine):.0%} {what}" for what, part in parts.items())
            ranks.append(f"{trace.title} {shares}")
        size = f" ({(mine.end - mine.start) / longest:.0%} of the longest)" if together else ""
        told.append(f"{name}{size}: {'; '.join(ranks)}")
    return f"{head(title, 'Timeline of a step')} Shares of the step. {'. '.join(told)}."


def window(traces: Sequence[RankTrace], step: int, within: str = "") -> Window:
    """Return the hull of the ranks' ranges "step {step}", or of those `within` it. Errors as for `draw_timeline`."""
    steps = [activity for trace in traces for activity in trace.ranges if activity.name == f"{STEP}{step}"]
    if not steps:
        raise ValueError(f"the trace has no range {STEP}{step}; record it with recording.record.")
    start, end = hull(activity.interval for activity in steps)
    if within:
        inner = [a.interval for t in traces for a in t.ranges if a.name.startswith(within) and start <= a.start < end]
        if not inner:
            raise ValueError(f"{STEP}{step} has no range {within!r}.")
        start, end = hull(inner)
    return Window(start, end)


def _windows(panels: Mapping[str, Sequence[RankTrace]], step: int, within: str) -> tuple[dict[str, Window], float]:
    """Return every panel's window, and how long the longest is."""
    if not panels:
        raise ValueError("no trace to draw; give at least one panel.")
    windows = {name: window(traces, step, within) for name, traces in panels.items()}
    return windows, max(mine.end - mine.start for mine in windows.values())


def ranges(trace: RankTrace, kind: str) -> list[Interval]:
    """Return when a rank's main thread was in the ranges of a kind, as a union."""
    return union(activity.interval for activity in trace.ranges if activity.name in KINDS[kind][1])


def _covered(parts: Sequence[Interval], mine: Window) -> float:
    return length(intersection(parts, [(mine.start, mine.end)])) / (mine.end - mine.start)


def _waits(traces: Sequence[RankTrace]) -> dict[int, float]:
    """Return, by a collective's id, when the last rank arrived at it or, if earlier, this rank left."""
    found = {}
    last = {met.collective.key: max(met.arrivals.values()) for met in meetings(traces)}
    for collective in [collective for trace in traces for collective in trace.collectives]:
        if collective.key in last:
            arrived = max(last[collective.key], collective.when.start)
            found[id(collective)] = min(arrived, collective.when.end)
    return found


def _parts(collective: TracedCollective, waits: Mapping[int, float]) -> dict[str, Interval]:
    """Return what a rank did in a collective, and when: keys of SENT."""
    (start, end), arrived = collective.when.interval, waits.get(id(collective))
    return {"unknown": (start, end)} if arrived is None else {"waiting": (start, arrived), "transfer": (arrived, end)}


def _shown(traces: Sequence[RankTrace], mine: Window) -> set[str]:
    """Return which of KINDS and SENT there is something of in the window."""
    waits, found = _waits(traces), dict[str, list[Interval]]()
    for trace in traces:
        for kind in KINDS:
            found.setdefault(kind, []).extend(ranges(trace, kind))
        for collective in trace.collectives:
            for what, interval in _parts(collective, waits).items():
                found.setdefault(what, []).append(interval)
    return {what for what, parts in found.items() if _covered(parts, mine)}


def _lanes(collectives: Sequence[TracedCollective]) -> list[tuple[TracedCollective, int]]:
    """Return each collective with the first lane that is free when it begins."""
    free: list[float] = []
    found = []
    for collective in sorted(collectives, key=lambda c: c.when.start):
        lane = next((n for n, end in enumerate(free) if end <= collective.when.start), len(free))
        free[lane : lane + 1] = [collective.when.end]
        found.append((collective, min(lane, LANES - 1)))
    return found


def _panel(name: str, traces: Sequence[RankTrace], mine: Window, scale: float) -> Block:
    pitch = MOVES_HIGH + SENT_HIGH + GAP
    waits, laid = _waits(traces), {trace.rank: _lanes(trace.collectives) for trace in traces}
    thin = SENT_HIGH / (1 + max((lane for lanes in laid.values() for _, lane in lanes), default=0))

    def place(interval: Interval) -> tuple[float, float]:
        start, end = (min(max(mine.share(moment), 0.0), 1.0) for moment in interval)
        return MARGIN + NAMES + scale * start, scale * (end - start)

    def fill(axes: Axes, y: float, high: float, interval: Interval, colour: str, gid: str, hatch: str = "") -> None:
        x, wide = place(interval)
        if wide > 0:
            box(axes, x, y, wide, high, colour, hatch=hatch, ec=MUTED, lw=_edge(colour), gid=gid)

    def paint_rank(axes: Axes, top: float, trace: RankTrace) -> None:
        gid = f"timeline-{name}-{trace.rank}"
        _name_rank(axes, top, trace)
        for kind, (colour, _) in KINDS.items():
            for interval in ranges(trace, kind):
                fill(axes, top, MOVES_HIGH, interval, colour, f"{gid}-{kind}")
        for collective, lane in laid[trace.rank]:
            y = top + MOVES_HIGH + 1 + thin * lane
            for what, interval in _parts(collective, waits).items():
                _, colour, hatch = SENT[what]
                fill(axes, y, thin - 0.6, interval, colour, f"{gid}-{what}", hatch)

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 5, name, bold=True)
        for n, trace in enumerate(traces):
            y = top + ROW + 9 + n * pitch
            box(axes, MARGIN + NAMES, y, scale, MOVES_HIGH + SENT_HIGH + 1, mix(MUTED, CARD, 0.9))
            paint_rank(axes, y, trace)

    return ROW + 9 + pitch * len(traces), paint


def _name_rank(axes: Axes, top: float, trace: RankTrace) -> None:
    """Write a rank's number, and paint its colour and hatch where the trace says where it stands."""
    if trace.place is not None:
        dp, tp = trace.place
        box(axes, MARGIN, top, 10, MOVES_HIGH + SENT_HIGH + 1, dp_colour(dp), hatch=TP_HATCHES[tp % 8], ec=INK, lw=0)
    put(axes, MARGIN + 15, top + 9, f"rank {trace.rank}", color=MUTED)


def _edge(colour: str) -> float:
    return 0.5 * (colour == CARD)  # what has the card's colour needs an outline


def _key(heading: str, looks: Sequence[tuple[str, str, str]]) -> Block:
    """Return a part of the key. looks: name, colour, hatch."""
    columns = (MARGIN, WIDTH / 2 + 4)

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 4, heading, bold=True)
        for n, (name, colour, hatch) in enumerate(looks):
            x, y = columns[n % 2], top + 6 + ROW * (1 + n // 2)
            box(axes, x, y + 1, 11, 10, colour, hatch=hatch, ec=MUTED, lw=_edge(colour), gid=f"key-{name}")
            put(axes, x + 15, y, name, color=MUTED)

    return 8 + ROW * (1 + -(-len(looks) // 2)), paint


def _axis(label: str) -> Block:
    def paint(axes: Axes, top: float) -> None:
        left = MARGIN + NAMES
        axes.plot([left, left + PANEL], [top, top], color=INK, lw=0.8)
        for percent in (0, 25, 50, 75, 100):
            x = left + PANEL * percent / 100
            axes.plot([x, x], [top, top + 4], color=INK, lw=0.8)
            put(axes, x, top + 6, f"{percent} %", "center" if percent < 100 else "right", color=MUTED)
        put(axes, left + PANEL / 2, top + 6 + ROW, label, "center", color=MUTED)

    return 2 * ROW + 4, paint
