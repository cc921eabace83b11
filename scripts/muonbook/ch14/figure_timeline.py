"""Timelines: what every rank did during one step, from a trace; several traces one above the other.

Two strips per rank: above, what its main thread was at; below, its collectives, in lanes where several fly at once,
hatched while it waited for the last rank to arrive. Callouts over the strips name what to look at, each with a bracket
over its stretch of time. The axis is the share of the step, for a trace shows when things happened and not how fast
they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.figures.plots import card, head
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, MUTED, ROW, TP_HATCHES, WIDTH, Block
from muonbook.measure.trace import STEP, RankTrace, TracedCollective
from muonbook.measure.trace_report import Interval, hull, intersection, length, meetings, union

from muonbook.figures.style import box, dp_colour, mix, put, wide  # isort: skip

NAMES, MOVES_HIGH, SENT_HIGH, GAP = 62.0, 17.0, 11.0, 7.0  # room for ranks' names; strips; between ranks
PANEL = WIDTH - 2 * MARGIN - NAMES
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {  # kind -> colour, ranges drawn in it
    "forward and backward": (mix(MUTED, CARD, 0.55), ("forward_backward",)),
    "ZeRO-1's moves": (COLD, ("reduce_scatter", "norms", "all_gather")),
    "gathers of momentum": (mix(COLD, "#4FA3E0", 0.75), ("dp_gather", "tp_gather")),
    "Newton–Schulz": (ACCENT, ("newton_schulz",)),
    "elementwise": (mix(ACCENT, "#F2A0A8", 0.7), ("momentum", "tp_shard", "dp_shard", "apply", "adamw")),
    "blocked in wait()": (CARD, ("wait",)),  # last, because it lies inside others
}
SENT: dict[str, tuple[str, str, str]] = {  # what a rank does in a collective -> name, colour, hatch
    "waiting": ("waiting for others", CARD, "//////"),
    "transfer": ("transfer", mix(INK, CARD, 0.15), ""),
    "unknown": ("not known which", mix(INK, CARD, 0.5), ""),
}
NOTE, BRACKET, APART = 15.0, 7.0, 5.0  # a row of callouts; the brackets below them; between two in a row
LANES = 3  # collectives at the same time that are drawn apart; more lie on top of each other


class Window(NamedTuple):
    """The part of a run that is drawn: from the first rank's start of a step to the last one's end. Microseconds."""

    start: float
    end: float

    def share(self, moment: float) -> float:
        return (moment - self.start) / (self.end - self.start)


Within = str | Window | Mapping[str, Window]  # the same part of every panel, or one for each


class Callout(NamedTuple):
    """Words over a stretch of time, in microseconds. rank: at whose strips to look; None: at everybody's."""

    words: str
    start: float
    end: float
    rank: int | None = None


def draw_timeline(
    panels: Mapping[str, Sequence[RankTrace]], step: int = 0, title: str = "", note: str = "", within: Within = "",
    callouts: Mapping[str, Sequence[Callout]] = MappingProxyType({}), rows: int = 0,
    key: Sequence[str] = (), only: Sequence[int] = (),
) -> Figure:  # fmt: skip
    """Draw one step of one or several traces.

    panels: title -> the ranks of one run, as `trace.read` returns them. within: a part that is drawn instead of the
    whole step: the name of a range, or its beginning, or the part itself, of one panel or of each. callouts: panel ->
    what is said over it. rows, key: room for so many rows of callouts, and which of KINDS and SENT the key has, by
    default those in sight: so that frames of one film are of one size. only: the ranks whose strips are drawn, all by
    default; how long they waited, all of them tell.
    Raises ValueError for no panel, and where a trace has no such step or range.
    """
    windows = _windows(panels, step, within)
    shown = set(key) or set().union(*(in_sight(traces, windows[name], only) for name, traces in panels.items()))
    moves = [(kind, colour, "") for kind, (colour, _) in KINDS.items() if kind in shown]
    sent = [look for what, look in SENT.items() if what in shown]
    keys = {"Above, the move:": moves, "Below, collectives:": sent}
    blocks = [_key(heading, looks) for heading, looks in keys.items() if looks]
    for name, traces in panels.items():
        blocks.append(_panel(name, traces, windows[name], callouts.get(name, ()), rows, only))
    return card(title, note, *blocks, _axis(f"share of {'the part shown' if within else 'the step'}"))


def describe_timeline(
    panels: Mapping[str, Sequence[RankTrace]], step: int = 0, title: str = "", within: Within = "",
    callouts: Mapping[str, Sequence[Callout]] = MappingProxyType({}), only: Sequence[int] = (), **_: Any,
) -> str:  # fmt: skip
    """Return alt text for `draw_timeline`: per rank, the shares of the step; and what the callouts say."""
    told = []
    windows = _windows(panels, step, within)
    for name, traces in panels.items():
        mine, ranks = windows[name], []
        waits = _waits(traces)
        for trace in _drawn(traces, only):
            sent = [c.when.interval for c in trace.collectives]
            waiting = [(c.when.start, waits[id(c)]) for c in trace.collectives if id(c) in waits]
            parts: dict[str, Sequence[Interval]] = {"in collectives": sent, "waiting in them": waiting}
            parts["in Newton–Schulz"] = ranges(trace, "Newton–Schulz")
            shares = ", ".join(f"{_covered(part, mine):.0%} {what}" for what, part in parts.items())
            ranks.append(f"{trace.title} {shares}")
        told.append(f"{name}: {'; '.join(ranks)}")
        if said := [
            f"{c.words} ({mine.share(c.start):.0%} to {mine.share(c.end):.0%})" for c in callouts.get(name, ())
        ]:
            told.append(f"Labelled: {'; '.join(said)}")
    return f"{head(title, 'Timeline of a step')} Shares of the {'part shown' if within else 'step'}. {'. '.join(told)}."


def window(traces: Sequence[RankTrace], step: int = 0, within: str | Window = "") -> Window:
    """Return the hull of the ranks' ranges "step {step}", or of those `within` it.

    Errors as for `draw_timeline`.
    """
    if isinstance(within, Window):
        return within
    steps = [activity for trace in traces for activity in trace.ranges if activity.name == f"{STEP}{step}"]
    if not steps:
        raise ValueError(f"the trace has no range {STEP}{step}; record it with recording.record.")
    whole = hull(activity.interval for activity in steps)

    if not within:
        return Window(*whole)
    found = [a.interval for t in traces for a in t.ranges if a.name.startswith(within)]
    if not (inner := [interval for interval in found if whole[0] <= interval[0] < whole[1]]):
        raise ValueError(f"{STEP}{step} has no range {within!r}.")
    return Window(*hull(inner))


def _windows(panels: Mapping[str, Sequence[RankTrace]], step: int, within: Within) -> dict[str, Window]:
    """Return every panel's window."""
    if not panels:
        raise ValueError("no trace to draw; give at least one panel.")
    of = within if isinstance(within, Mapping) else dict.fromkeys(panels, within)
    return {name: window(traces, step, of[name]) for name, traces in panels.items()}


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


def _drawn(traces: Sequence[RankTrace], only: Sequence[int]) -> list[RankTrace]:
    return [trace for trace in traces if not only or trace.rank in only]


def in_sight(traces: Sequence[RankTrace], mine: Window, only: Sequence[int]) -> set[str]:
    """Return which of KINDS and SENT there is something of in the window."""
    waits, found = _waits(traces), dict[str, list[Interval]]()
    for trace in _drawn(traces, only):
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


def _panel(
    name: str, traces: Sequence[RankTrace], mine: Window, callouts: Sequence[Callout], rows: int, only: Sequence[int]
) -> Block:
    pitch = MOVES_HIGH + SENT_HIGH + GAP
    waits, traces = _waits(traces), _drawn(traces, only)
    laid = {trace.rank: _lanes(trace.collectives) for trace in traces}
    thin = SENT_HIGH / (1 + max((lane for lanes in laid.values() for _, lane in lanes), default=0))

    def place(interval: Interval) -> tuple[float, float]:
        start, end = (min(max(mine.share(moment), 0.0), 1.0) for moment in interval)
        return MARGIN + NAMES + PANEL * start, PANEL * (end - start)

    def middle(interval: Interval) -> float:
        x, across = place(interval)
        return x + across / 2

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

    spots = _spots(callouts, [middle((c.start, c.end)) for c in callouts], rows)
    rows = max([rows, *(row + 1 for _, row in spots)])
    above = ROW + 9 + (rows * NOTE + BRACKET if rows else 0)
    places = {trace.rank: n for n, trace in enumerate(traces)}

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 5, name, bold=True)
        first = top + above
        for n, trace in enumerate(traces):
            y = first + n * pitch
            box(axes, MARGIN + NAMES, y, PANEL, MOVES_HIGH + SENT_HIGH + 1, mix(MUTED, CARD, 0.88))
            paint_rank(axes, y, trace)
        for callout, (left, row) in zip(callouts, spots, strict=True):
            x, across = place((callout.start, callout.end))
            _call_out(axes, callout.words, left, first - BRACKET - NOTE * (row + 1), (x, across), first - 2)
            if callout.rank is not None:
                strips = first + pitch * places[callout.rank]
                _frame(axes, x, across, first - 2, strips, gid=f"callout-{callout.words}")

    return above + pitch * len(traces), paint


def _spots(callouts: Sequence[Callout], middles: Sequence[float], most: int) -> list[tuple[float, int]]:
    """Return for each callout its words' left edge and their row, 0 the lowest: none on another, nor on its stem.

    middles: of the brackets. The fewest rows that will do; words stand over the middle of theirs if there is room, else
    beside it. Where `most` rows, or else one for each, are too few for that, stems run behind words.
    """
    rooms = [wide(callout.words) for callout in callouts]

    def place(placed: list[tuple[float, int]], rows: int, strict: bool) -> list[tuple[float, int]] | None:
        if (n := len(placed)) == len(callouts):
            return placed
        for row, part in itertools.product(range(rows), (0.5, 0.75, 0.25, 0.97, 0.03)):
            left = min(max(middles[n] - part * rooms[n], MARGIN), WIDTH - MARGIN - rooms[n])
            before = zip(placed, rooms, middles, strict=False)
            if not any(_collide((left, row), rooms[n], middles[n], *other, strict) for other in before):
                found = place([*placed, (left, row)], rows, strict)
                if found is not None:
                    return found
        return None

    few = most or len(callouts)
    tries = [*((rows, strict) for strict in (True, False) for rows in range(few + 1)), (len(callouts), False)]
    found = (place([], rows, strict) for rows, strict in tries)
    return next(spots for spots in found if spots is not None)  # a row for each always does


def _collide(
    spot: tuple[float, int], room: float, stem: float, other: tuple[float, int], its_room: float, its_stem: float,
    strict: bool,
) -> bool:  # fmt: skip
    """Say whether words lie on others, or, if strict, a stem crosses words below its own."""
    (left, row), (start, level) = spot, other
    if row == level:
        return left < start + its_room + APART and start < left + room + APART
    crossed, width, crossing = (start, its_room, stem) if row > level else (left, room, its_stem)
    return strict and crossed - 2 < crossing < crossed + width + 2


def _call_out(axes: Axes, words: str, left: float, top: float, extent: tuple[float, float], floor: float) -> None:
    """Write words, and draw a bracket over `extent`, left and width, that reaches down to `floor`; and their stem."""
    (x, across), y = extent, floor - BRACKET + 2
    put(axes, left, top, words, bold=True, bbox={"fc": CARD, "lw": 0.0, "pad": 1.0}, zorder=4)
    stem = min(max(x + across / 2, left + 1), left + wide(words) - 1)
    axes.plot([stem, stem], [top + NOTE - 2, y], color=INK, lw=1.0)
    axes.plot([x, x, x + across, x + across], [floor, y, y, floor], color=INK, lw=1.4, solid_joinstyle="miter")


def _frame(axes: Axes, x: float, across: float, top: float, strips: float, gid: str) -> None:
    """Lead a bracket's sides down to one rank's strips, and around them."""
    bottom = strips + MOVES_HIGH + SENT_HIGH + 2
    for side in (x, x + across):
        axes.plot([side, side], [top, strips], color=CARD, lw=2.6)
        axes.plot([side, side], [top, strips], color=INK, lw=1.0, ls=(0, (2, 1.5)))
    box(axes, x, strips - 1, across, bottom - strips, "none", ec=INK, lw=1.6, fill=False, gid=gid)


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
