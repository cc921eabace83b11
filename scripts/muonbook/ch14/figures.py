"""Chapter 14's pictures: recorded steps as timelines, with words over what to look at, and simulated schedules.

In a timeline a rank has two strips: above, what its main thread was at; below, its collectives, hatched while it waited
for the last rank to arrive. The axis is the share of the part that is drawn, for a trace shows when things happened,
and its profiler makes them slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muonbook.baselines import TITLES
from muonbook.figures.player import Frame
from muonbook.figures.plots import card, head, part_key
from muonbook.figures.style import ACCENT, CARD, COLD, INK, MARGIN, MUTED, ROW, TP_HATCHES, WIDTH, Block
from muonbook.measure.trace import STEP, Activity, RankTrace, TracedCollective
from muonbook.measure.trace_report import MS, Interval, hull, intersection, length, meetings, union

from muonbook.figures.style import box, dp_colour, ink_on, mix, put, wide  # isort: skip

NAMES, MOVES_HIGH, SENT_HIGH, GAP = 62.0, 17.0, 11.0, 7.0  # room for ranks' names; strips; between ranks
PANEL = WIDTH - 2 * MARGIN - NAMES
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {  # kind -> colour, ranges drawn in it
    "forward and backward": (mix(MUTED, CARD, 0.55), ("forward_backward",)),
    "ZeRO-1's moves": (COLD, ("reduce_scatter", "norms", "all_gather")),
    "gathers of momentum": (mix(COLD, "#4FA3E0", 0.75), ("dp_gather", "tp_gather")),
    "Newton–Schulz": (ACCENT, ("newton_schulz",)),
    "element by element": (mix(ACCENT, "#F2A0A8", 0.7), ("momentum", "tp_shard", "dp_shard", "apply", "adamw")),
}
SENT: dict[str, tuple[str, str, str]] = {  # what a rank does in a collective -> name, colour, hatch
    "waiting": ("waiting for others", CARD, "//////"),
    "transfer": ("transfer", mix(INK, CARD, 0.15), ""),
    "unknown": ("either of the two", mix(INK, CARD, 0.5), ""),
}
ROWS, NOTE, BRACKET, APART = 2, 15.0, 7.0, 5.0  # rows of callouts; one of them; brackets below; between two in a row
ASIDE = 12.0  # how far words may stand from the middle of their bracket before they go up a row
REDUCTION = ("reduce_scatter", "norms")  # moves that average gradients


class Window(NamedTuple):
    """The part of a run that is drawn: from the first rank's start of a step to the last one's end. Microseconds."""

    start: float
    end: float

    def share(self, moment: float) -> float:
        return (moment - self.start) / (self.end - self.start)


class Callout(NamedTuple):
    """Words over a stretch of time, in microseconds. rank: at whose strips to look; None: at everybody's."""

    words: str
    start: float
    end: float
    rank: int | None = None


# ---- A timeline -------------------------------------------------------------------------------------------


def draw_timeline(
    panels: Mapping[str, Sequence[RankTrace]], windows: Mapping[str, Window], title: str = "",
    callouts: Mapping[str, Sequence[Callout]] = MappingProxyType({}), only: Sequence[int] = (),
) -> Figure:  # fmt: skip
    """Draw a part of one or several traces.

    panels: title -> the ranks of one run, as `trace.read` returns them. windows: panel -> the part that is drawn.
    callouts: panel -> what is said over it. only: the ranks whose strips are drawn, all by default; how long they
    waited, all of them tell.
    """
    moves = [(kind, colour, "") for kind, (colour, _) in KINDS.items()]
    blocks = [_key("Above, the move:", moves), _key("Below, collectives:", list(SENT.values()))]
    for name, traces in panels.items():
        blocks.append(_panel(name, traces, windows[name], callouts.get(name, ()), only))
    longest = max(part.end - part.start for part in windows.values()) * MS
    return card(title, "", *blocks, _axis(f"share of the {longest:.2g} ms shown"))


def describe_timeline(
    panels: Mapping[str, Sequence[RankTrace]], windows: Mapping[str, Window], title: str = "",
    callouts: Mapping[str, Sequence[Callout]] = MappingProxyType({}), only: Sequence[int] = (),
) -> str:  # fmt: skip
    """Return alt text for `draw_timeline`: per rank, the shares of the part; and what the callouts say."""
    told = []
    for name, traces in panels.items():
        mine, ranks = windows[name], []
        waits = _waits(traces)
        for trace in _drawn(traces, only):
            if not trace.collectives and not trace.ranges:
                ranks.append(f"{trace.title}'s trace is not opened")
                continue
            sent = [c.when.interval for c in trace.collectives]
            waiting = [(c.when.start, waits[id(c)]) for c in trace.collectives if id(c) in waits]
            parts: dict[str, Sequence[Interval]] = {"in collectives": sent, "waiting in them": waiting}
            if not waits:  # a rank by itself cannot tell
                parts = {"in collectives, waiting or sending": sent}
            parts["in Newton–Schulz"] = ranges(trace, "Newton–Schulz")
            shares = ", ".join(f"{_covered(part, mine):.0%} {what}" for what, part in parts.items())
            ranks.append(f"{trace.title} {shares}")
        told.append(f"{name}: {'; '.join(ranks)}")
        if said := [
            f"{c.words} ({mine.share(c.start):.0%} to {mine.share(c.end):.0%})" for c in callouts.get(name, ())
        ]:
            told.append(f"Labelled: {'; '.join(said)}")
    return f"{head(title, 'Timeline of a step')} Shares of the part shown. {'. '.join(told)}."


def whole_step(traces: Sequence[RankTrace]) -> Window:
    """Return the step of these ranks, from the first one's start to the last one's end."""
    return Window(*hull(each.interval for trace in traces for each in trace.ranges if each.name == f"{STEP}0"))


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


def _panel(
    name: str, traces: Sequence[RankTrace], mine: Window, callouts: Sequence[Callout], only: Sequence[int]
) -> Block:
    pitch = MOVES_HIGH + SENT_HIGH + GAP
    waits, traces = _waits(traces), _drawn(traces, only)

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
        if not trace.ranges:
            put(axes, MARGIN + NAMES + 6, top + 9, "its trace is not opened", color=MUTED)
        for kind, (colour, _) in KINDS.items():
            for interval in ranges(trace, kind):
                fill(axes, top, MOVES_HIGH, interval, colour, f"{gid}-{kind}")
        for collective in trace.collectives:
            for what, interval in _parts(collective, waits).items():
                _, colour, hatch = SENT[what]
                fill(axes, top + MOVES_HIGH + 1, SENT_HIGH - 0.6, interval, colour, f"{gid}-{what}", hatch)

    spots = _spots(callouts, [middle((c.start, c.end)) for c in callouts])
    above = ROW + 9 + (ROWS * NOTE + BRACKET if callouts else 0)
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


def _spots(callouts: Sequence[Callout], middles: Sequence[float]) -> list[tuple[float, int]]:
    """Return for each callout its words' left edge and their row, 0 the lowest: the first in which they have room.

    middles: of the brackets, over which words stand if there is room, else a little to the right.
    """
    found, ends = list[tuple[float, int]](), [0.0] * ROWS  # how far words reach in each row; callouts go to the right
    for callout, middle in zip(callouts, middles, strict=True):
        room = wide(callout.words)
        left = min(max(middle - room / 2, MARGIN), WIDTH - MARGIN - room)
        near = (row for row, end in enumerate(ends) if end + APART <= left + ASIDE)
        row = next(near, ends.index(min(ends)))
        left = max(left, ends[row] + APART)
        ends[row] = left + room
        found.append((left, row))
    return found


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


# ---- The chapter's timelines: what to look at, found by the names of moves and groups ------------------------


def frames_of_waiting(ranks: Sequence[RankTrace]) -> list[Frame]:
    """Return two looks at the gather of momentum that made a rank wait longest: by its trace, then by all traces."""
    gathers = [met for met in meetings(ranks) if met.collective.name == "dp" and "momentum" in met.collective.label]
    met = max(gathers, key=lambda one: max(one.waiting.values()))
    last, early = (pick(met.arrivals, key=lambda rank: met.arrivals[rank]) for pick in (max, min))
    called, arrived, left = met.arrivals[early], met.arrivals[last], max(met.ends.values())
    margin = 0.25 * (left - called)
    blind = [replace(trace, collectives=[], ranges=[]) if trace.rank != early else trace for trace in ranks]
    looks = [
        (
            blind,
            [Callout("one all-gather", called, met.ends[early], early)],
            f"By rank {early}'s trace it takes long. Is the network slow?",
        ),
        (
            ranks,
            [
                Callout(f"rank {early} waits", called, arrived, early),
                Callout(f"rank {last} has come", arrived, met.ends[last], last),
            ],
            f"In rank {last}'s trace it is short. Rank {last} came late, and rank {early} waited for it.",
        ),
    ]
    title, both = "One all-gather, two traces", sorted((early, last))
    within = Window(called - margin, left + margin)
    frames = []
    for traces, said, caption in looks:
        panel = {f"Muon, {TITLES['muon']}": traces}
        look: dict[str, Any] = dict(title=title, windows=dict.fromkeys(panel, within), only=both)
        look["callouts"] = dict.fromkeys(panel, said)
        frames.append(Frame(draw_timeline(panel, **look), describe_timeline(panel, **look), caption))
    return frames


def draw_a_step(adamw: Sequence[RankTrace], muon: Sequence[RankTrace], title: str) -> tuple[Figure, str]:
    """Draw the first rank's step of AdamW over its step of Muon, on one scale; return it and its alt text."""
    panels = {TITLES["zero1"]: adamw, f"Muon, {TITLES['muon']}": muon}
    look: dict[str, Any] = {"title": title, "only": [muon[0].rank]}
    look["windows"] = on_one_scale({name: whole_step(ranks[:1]) for name, ranks in panels.items()})
    look["callouts"] = dict(zip(panels, (of_adamw(adamw), of_muon(muon)), strict=True))
    return draw_timeline(panels, **look), describe_timeline(panels, **look)


def of_adamw(ranks: Sequence[RankTrace]) -> list[Callout]:
    """Return the parts of a training step of ZeRO-1 AdamW, on its first rank."""
    first = ranks[0]
    return [
        _over(first, "passes", "forward_backward"),
        _over(first, "gradients", *REDUCTION),
        _over(first, "parameters", "all_gather"),
    ]


def of_muon(ranks: Sequence[RankTrace]) -> list[Callout]:
    """Return the same of Muon: after the reduction bucket by bucket."""
    first = ranks[0]
    found = [_over(first, "passes", "forward_backward"), _over(first, "gradients", *REDUCTION)]
    begins, ends = _named(first, "momentum"), _named(first, "all_gather")
    rounds = zip(begins, ends, strict=True)
    return found + [Callout(f"bucket {n}", begin.start, end.end) for n, (begin, end) in enumerate(rounds)]


def on_one_scale(parts: Mapping[str, Window]) -> dict[str, Window]:
    """Return every part from where it begins, all as long as the longest."""
    longest = max(part.end - part.start for part in parts.values())
    return {name: Window(part.start, part.start + longest) for name, part in parts.items()}


def _over(rank: RankTrace, words: str, *names: str) -> Callout:
    """Return words over a rank's ranges of these names, from the first to the last."""
    return Callout(words, *hull(activity.interval for name in names for activity in _named(rank, name)))


def _named(rank: RankTrace, name: str) -> list[Activity]:
    return sorted((activity for activity in rank.ranges if activity.name == name), key=lambda activity: activity.start)


# ---- Simulated schedules ----------------------------------------------------------------------------------

LOOKS = {  # what a span is, the first word of its name -> how the key calls it, and its colour in timelines
    "gather": ("gather", KINDS["gathers of momentum"][0]),
    "work": ("work (Newton–Schulz)", KINDS["Newton–Schulz"][0]),
    "publish": ("publication of parameters", KINDS["ZeRO-1's moves"][0]),
}
Span = tuple[str, float, float]  # what, such as "gather 0"; from when to when
LABELS, HIGH, PITCH = 38.0, 19.0, 22.0  # room for a lane's name; how high a lane is; from one to the next


def draw_schedules(schedules: Mapping[str, Sequence[Span]], title: str = "") -> Figure:
    """Draw the link above the rank's work, schedule by schedule on one scale.

    schedules: name -> its spans. Each gets its share of the first one's length.
    """
    key = part_key({name: (colour, "") for name, colour in LOOKS.values()})
    ends = {name: _end(spans) for name, spans in schedules.items()}
    first, scale = next(iter(ends.values())), (WIDTH - 2 * MARGIN - LABELS) / max(ends.values())
    note = f"Simulated, time to the right. 100 %: {next(iter(ends))}. Numbers are those of the buckets."
    blocks = [_schedule(name, spans, f"{100 * ends[name] / first:.0f} %", scale) for name, spans in schedules.items()]
    return card(title, note, *key, *blocks)


def describe_schedules(schedules: Mapping[str, Sequence[Span]], title: str = "") -> str:
    """Return alt text for `draw_schedules`: how long each schedule is, and for how much of it both lanes are busy."""
    told, first = [], _end(next(iter(schedules.values())))
    for name, spans in schedules.items():
        working, sending = ([(a, b) for what, a, b in spans if what.startswith("work") == on] for on in (True, False))
        both = length(intersection(working, sending)) / length(sending)
        told.append(f"{name}, {_end(spans) / first:.0%} of the first one's length: {both:.0%} of sending under work")
    return f"{head(title, 'Simulated schedules')} {'; '.join(told)}."


def _end(spans: Sequence[Span]) -> float:
    return max(end for _, _, end in spans)


def _schedule(name: str, spans: Sequence[Span], share: str, scale: float) -> Block:
    left = MARGIN + LABELS
    across = scale * _end(spans)

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top + 8, name, bold=True)
        put(axes, left + across, top + 8, share, "right", bold=True)
        rows = {lane: top + 12 + ROW + PITCH * n for n, lane in enumerate(("link", "work"))}
        for lane, y in rows.items():
            put(axes, MARGIN, y + 4, lane, color=MUTED)
            box(axes, left, y, across, HIGH, mix(MUTED, CARD, 0.88))
        for what, start, end in spans:
            kind, _, bucket = what.partition(" ")
            x, y, colour = left + scale * start, rows["work" if kind == "work" else "link"], LOOKS[kind][1]
            box(axes, x, y, scale * (end - start), HIGH, colour, ec=CARD, lw=1.0, gid=f"{name}-{kind}-{bucket}")
            if scale * (end - start) > wide(bucket) + 2:
                put(axes, x + scale * (end - start) / 2, y + 4.5, bucket, "center", bold=True, color=ink_on(colour))
        axes.vlines([left + across], rows["link"] - 3, rows["work"] + HIGH + 3, mix(INK, CARD, 0.5), lw=1.0)

    return 12 + ROW + PITCH + HIGH + 4, paint
