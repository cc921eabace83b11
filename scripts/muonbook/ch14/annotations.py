"""What to look at in chapter 14's timelines: found in the traces, by the names of moves and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from muonbook.ch14.figure_timeline import Callout, Window, describe_timeline, draw_timeline, in_sight, window
from muonbook.figures.player import Frame
from muonbook.measure.trace import Activity, RankTrace
from muonbook.measure.trace_report import hull, meetings

REDUCTION = ("reduce_scatter", "norms")


def of_adamw(ranks: Sequence[RankTrace]) -> list[Callout]:
    """Return the parts of a training step of ZeRO-1 AdamW, on its first rank."""
    first = ranks[0]
    return [
        _over(first, "forward, backward", "forward_backward"),
        _over(first, "mean gradients", *REDUCTION),
        _over(first, "AdamW", "adamw"),
        _over(first, "parameters", "all_gather"),
    ]


def of_muon(ranks: Sequence[RankTrace]) -> list[Callout]:
    """Return the same of Muon: after the reduction bucket by bucket."""
    first = ranks[0]
    found = [_over(first, "forward, backward", "forward_backward"), _over(first, "mean gradients", *REDUCTION)]
    begins, ends = _named(first, "momentum"), _named(first, "all_gather")
    rounds = zip(begins, ends, strict=True)
    return found + [Callout(f"bucket {n}", begin.start, end.end) for n, (begin, end) in enumerate(rounds)]


def on_one_scale(parts: Mapping[str, Window]) -> dict[str, Window]:
    """Return every part from where it begins, all as long as the longest."""
    longest = max(part.end - part.start for part in parts.values())
    return {name: Window(part.start, part.start + longest) for name, part in parts.items()}


def draw_a_step(adamw: Sequence[RankTrace], muon: Sequence[RankTrace], title: str) -> tuple[Figure, str]:
    """Draw the first rank's step of AdamW over its step of Muon, on one scale; return it and its alt text."""
    panels = {"AdamW, ZeRO-1": adamw, "Muon, bucketed": muon}
    look: dict[str, Any] = {"title": title, "only": [muon[0].rank]}
    look["within"] = on_one_scale({name: window(ranks[:1]) for name, ranks in panels.items()})
    look["callouts"] = dict(zip(panels, (of_adamw(adamw), of_muon(muon)), strict=True))
    return draw_timeline(panels, **look, rows=2), describe_timeline(panels, **look)


def after_the_gradients(rank: RankTrace) -> Window:
    """Return the part of a rank's step that begins with Muon's first move."""
    return Window(_named(rank, "momentum")[0].start, window([rank]).end)


def of_schedules(runs: Mapping[str, Sequence[RankTrace]]) -> dict[str, list[Callout]]:
    """Return what each schedule does after the gradients, on its first rank. runs: of `optim.overlap.OVERLAPS`."""
    first = {name: ranks[0] for name, ranks in runs.items()}
    bucket = hull(activity.interval for activity in _first_bucket(first["synchronous"]).ranges)
    (begin, end), pipelined = after_the_gradients(first["naive"]), after_the_gradients(first["pipelined"])
    works, rests = hull(activity.interval for activity in _named(first["naive"], "newton_schulz"))
    return {
        "synchronous": [Callout("a bucket: gather, work, publish", *bucket)],
        "naive": [Callout("gathers", begin, works), Callout("work", works, rests), Callout("publish", rests, end)],
        "pipelined": [Callout("work while the next travels", *pipelined)],
    }


def frames_of_schedules(runs: Mapping[str, Sequence[RankTrace]], title: str, note: str = "") -> list[Frame]:
    """Return a frame for every schedule's recorded step, after the gradients, each below those before it, on one scale.

    runs: name, of `optim.overlap.OVERLAPS` and synchronous first -> its ranks' traces. The strips are the first
    rank's.
    """
    windows = on_one_scale({name: after_the_gradients(ranks[0]) for name, ranks in runs.items()})
    said = of_schedules(runs)
    only, frames = [next(iter(runs.values()))[0].rank], []
    told = {
        "synchronous": "Wire and work take turns, bucket by bucket.",
        "naive": "All gathers, then all work: hardly any of it beside the wire.",
        "pipelined": "Work beside the wire.",
    }
    key = sorted(set().union(*(in_sight(ranks, windows[name], only) for name, ranks in runs.items())))
    blank = {name: [replace(rank, collectives=[], ranges=[]) for rank in ranks] for name, ranks in runs.items()}
    for n, name in enumerate(runs, 1):
        begun = dict(list(runs.items())[:n])
        look: dict[str, Any] = {"title": title, "only": only, "within": windows, "callouts": {name: said[name]}}
        figure = draw_timeline(blank | begun, **look, note=note, rows=1, key=key)
        frames.append(Frame(figure, describe_timeline(begun, **look), told[name]))
    return frames


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
            f"By rank {early}'s trace it takes long. Is the wire slow?",
        ),
        (
            ranks,
            [
                Callout(f"rank {early} waits", called, arrived, early),
                Callout(f"rank {last} has come", arrived, met.ends[last], last),
            ],
            f"By rank {last}'s it is soon over. Rank {last} was late, and rank {early} waited for it.",
        ),
    ]
    title, both = "One all-gather, two traces", sorted((early, last))
    within = Window(called - margin, left + margin)
    key = sorted(set().union(*(in_sight(traces, within, both) for traces, *_ in looks)))
    frames = []
    for traces, said, caption in looks:
        panel = {"Muon, bucketed": traces}
        look: dict[str, Any] = dict(title=title, within=within, callouts=dict.fromkeys(panel, said), only=both)
        frames.append(Frame(draw_timeline(panel, **look, rows=1, key=key), describe_timeline(panel, **look), caption))
    return frames


def _first_bucket(rank: RankTrace) -> RankTrace:
    """Return a rank's trace with the ranges of its first bucket alone."""
    start, end = _named(rank, "momentum")[0].start, _named(rank, "all_gather")[0].end
    return replace(
        rank, ranges=[activity for activity in rank.ranges if start <= activity.start and activity.end <= end]
    )


def _over(rank: RankTrace, words: str, *names: str) -> Callout:
    """Return words over a rank's ranges of these names, from the first to the last."""
    return Callout(words, *hull(activity.interval for name in names for activity in _named(rank, name)))


def _named(rank: RankTrace, name: str) -> list[Activity]:
    return sorted((activity for activity in rank.ranges if activity.name == name), key=lambda activity: activity.start)
