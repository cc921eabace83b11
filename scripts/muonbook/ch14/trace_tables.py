"""Chapter 14's stored measurements as lines of text: what the page prints. Values come first, what they are after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muonbook.ch14.figure_schedules import length as length_of_sketch
from muonbook.figures.plots import Curve
from muonbook.measure.trace import RankTrace
from muonbook.measure.trace_report import Interval, intersection, length, meetings, union

Found = Mapping[str, Any]
FREE = "no limit"  # a link that is as fast as it goes
AHEAD = ("naive", "pipelined")  # schedules that start a collective before they need it
WORK = ("momentum", "newton_schulz", "apply")  # ranges of a step that compute and do not send
READINGS = (  # what one may compare of two runs, from the report's reading to what one pays
    "collectives, durations summed",
    "collectives, as a union",
    "collectives with no work beside",
    "the whole run, first start to last end",
)


def waiting_lines(ranks: Sequence[RankTrace]) -> list[str]:
    """Return how each rank's time inside collectives divides, and which rank the others waited for most."""
    met = meetings(ranks)
    lines, caused = ["waiting  transfer"], dict[str, float]()
    for rank in ranks:
        waiting = sum(m.waiting.get(rank.rank, 0.0) for m in met)
        share = waiting / (waiting + sum(m.transfer.get(rank.rank, 0.0) for m in met))
        lines.append(f"{share:7.0%}{1 - share:10.0%}  {rank.title}")
        arrived_last = (m for m in met if max(m.arrivals.values()) == m.arrivals.get(rank.rank))
        caused[rank.title] = sum(sum(m.waiting.values()) for m in arrived_last)
    last = max(caused, key=lambda title: caused[title])
    return [*lines, f"{caused[last] / sum(caused.values()):7.0%} of all waiting is for {last}"]


def optimizer_lines(trace: Found) -> list[str]:
    """Return the optimizer of a public trace, `in_ms`, on host and GPU, over the time in which the GPU was busy."""
    rows = {
        "optimizer_cpu": "on the host, launching",
        "optimizer_gpu": "on the GPU, inside the optimizer's range",
        "optimizer_gpu_computing": "in that range, computing",
    }
    return [f"{trace[key] / trace['busy']:6.1%}  {what}" for key, what in rows.items()]


def on_every_link(found: Found, asleep: bool = False) -> dict[str, Found]:
    """Return {link: the race of two ranks over it}, from the slowest to one without a limit.

    asleep: the races in which Newton–Schulz leaves its core to the collectives.
    """
    links, free = ("links_asleep", "loopback_asleep") if asleep else ("links", "loopback")
    limited = {f"{float(rate):,.0f} Mbit/s": found[links][rate] for rate in sorted(found[links], key=float)}
    return limited | {FREE: found[free]}


def hideable_over_work(race: Found) -> float:
    """Return a synchronous step's time in collectives after the gradients, which can hide, over its time at work."""
    step = race["recorded"]["synchronous"]
    return step["hideable"] / step["computation"]


def gain_curves(found: Found, kinds: Mapping[str, tuple[str, bool]]) -> tuple[dict[str, Curve], dict[str, Any]]:
    """Return {name: (x, y)} and {name: (x, low, high)}, the middle half of all rounds.

    kinds: name -> a schedule, and whether asleep. x: `hideable_over_work` of every link, awake; y: the schedule's step
    over the synchronous one.
    """
    awake = on_every_link(found)
    links = sorted(awake, key=lambda link: hideable_over_work(awake[link]))
    x, curves, bands = [hideable_over_work(awake[link]) for link in links], dict[str, Curve](), {}
    for name, (schedule, asleep) in kinds.items():
        races = on_every_link(found, asleep)
        over = [races[link]["ratio_to_synchronous"][schedule] for link in links]
        curves[name] = x, [spread["median"] for spread in over]
        low, high = zip(*(spread["quartiles"] for spread in over), strict=True)
        bands[name] = x, low, high
    return curves, bands


def sketched(found: Found, schedule: str) -> Curve:
    """Return what the sketch says of a schedule's step over the synchronous one, over `hideable_over_work`, awake.

    Collectives of every bucket take that share of its work, half of it before; what a synchronous step does besides,
    nothing shortens.
    """
    x, y = [], []
    for race in sorted(on_every_link(found).values(), key=hideable_over_work):
        step, count = race["recorded"]["synchronous"], race["waves"]
        x.append(wire := hideable_over_work(race))
        durations = {"gather": wire / 2, "work": 1.0, "parameters": wire / 2}
        besides = count * (step["span"] / step["computation"] - wire - 1)
        after, before = (besides + length_of_sketch(name, durations, count) for name in (schedule, "synchronous"))
        y.append(after / before)
    return x, y


def gain_lines(found: Found) -> list[str]:
    """Return what naive and pipelined steps take over synchronous ones, on every link and on a grid; and asleep."""
    lines = ["step / that of the synchronous schedule:", "", "median  quartiles    rounds"]
    races = {f"{link}, 2 x 1": race for link, race in on_every_link(found).items()}
    races[f"{FREE}, 2 x 2"] = found["loopback_2x2"]
    races |= {f"{link}, sleeping": race for link, race in on_every_link(found, asleep=True).items()}
    for place, race in races.items():
        for schedule in AHEAD:
            row = race["ratio_to_synchronous"][schedule]
            low, high = row["quartiles"]
            lines.append(f"{row['median']:6.2f}  {low:.2f} to {high:.2f}{row['count']:5}  {schedule}, {place}")
    return lines


def hiding_lines(links: Found) -> list[str]:
    """Return what training steps take that hide gradients, or parameters too, over those that hide nothing."""
    lines = ["step / that with nothing hidden:", "", "median  quartiles    rounds"]
    for link, race in links.items():
        for name, ratios in race["ratio_to_nothing_hidden"].items():
            for hidden in ("gradients", "both"):
                row = ratios[hidden]
                low, high = row["quartiles"]
                lines.append(f"{row['median']:6.2f}  {low:.2f} to {high:.2f}{row['count']:5}  {name}, {hidden}, {link}")
    return lines


def times(rank: RankTrace, part: Interval) -> dict[str, float]:
    """Return how long a rank was at Muon's work alone, at work while in a collective, in a collective alone, and in
    neither, during a part of its step: us, which add up to the part.
    """
    working = intersection(union(each.interval for each in rank.ranges if each.name in WORK), [part])
    sending = intersection(union(c.when.interval for c in rank.collectives), [part])
    work, wire, both = length(working), length(sending), length(intersection(working, sending))
    idle = part[1] - part[0] - (work + wire - both)
    return {"work": work - both, "work under the wire": both, "wire": wire - both, "neither": idle}


def parts(run: Found, whole: float) -> dict[str, float]:
    """Return {what a rank was at: %} of a recorded step, or of a public trace, `in_ms`. whole: ms that are 100 %."""
    both = run["overlap"]
    found = {"work": run["computation"] - both, "both": both, "collectives": run["communication"] - both}
    found["neither"] = run["span"] - sum(found.values())
    return {what: 100 * time / whole for what, time in found.items()}


def in_ms(trace: Found) -> dict[str, Any]:
    """Return a public trace's numbers by the names that recorded steps have: without "_ms"."""
    return {key.removesuffix("_ms"): value for key, value in trace.items()}


def readings(synchronous: Found, asynchronous: Found) -> dict[str, float]:
    """Return {what one may read, one of `READINGS`: the asynchronous run over the synchronous one}.

    Each is a recorded step, or `in_ms` of a public trace.
    """
    runs = (asynchronous, synchronous)
    read = [(row["communication_sum"], row["communication"], row["communication"] - row["overlap"], row["span"])
            for row in runs]  # fmt: skip
    return {what: after / before for what, after, before in zip(READINGS, *read, strict=True)}


def reading_lines(found: Found, synchronous: Found, asynchronous: Found) -> list[str]:
    """Return pipelined steps over synchronous ones on every link in all readings, and the report's run below them.

    synchronous, asynchronous: two public traces, `in_ms`. "hidden": the share of collectives that lies under work.
    """
    steps = {link: race["recorded"] for link, race in on_every_link(found).items()}
    pairs = {link: (step["synchronous"], step["pipelined"]) for link, step in steps.items()}
    lines = ["summed  union  alone  whole  hidden"]
    for name, (before, after) in (pairs | {"the report's": (synchronous, asynchronous)}).items():
        cells = "".join(f"{ratio:7.2f}" for ratio in readings(before, after).values())[1:]
        lines.append(f"{cells}{after['overlap'] / after['communication']:>8.0%}  {name}")
    return lines
