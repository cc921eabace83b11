"""What to look at in chapter 14's timelines: found in the traces, by the names of moves and groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from muonbook.ch14.figure_timeline import Callout, Window, window
from muonbook.measure.trace import Activity, RankTrace
from muonbook.measure.trace_report import hull, meetings

OPTIMIZER = "Optimizer.step"  # how the range around an optimizer's step begins
REDUCTION = ("reduce_scatter", "norms")


class View(NamedTuple):
    """A part of a step, and what is said of it."""

    within: Window
    callouts: tuple[Callout, ...]
    caption: str


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
    """Return the same of Muon: after the reduction bucket by bucket, without the last, which holds no matrix."""
    first = ranks[0]
    found = [_over(first, "forward, backward", "forward_backward"), _over(first, "mean gradients", *REDUCTION)]
    begins, ends = _named(first, "momentum"), _named(first, "all_gather")
    rounds = zip(begins[:-1], ends[:-1], strict=True)
    return found + [Callout(f"bucket {n}", begin.start, end.end) for n, (begin, end) in enumerate(rounds)]


def widening(ranks: Sequence[RankTrace]) -> list[View]:
    """Return two looks at a training step of Muon: one meeting in it, and the optimizer's step around that."""
    gathers = [met for met in meetings(ranks) if met.collective.name == "dp" and "momentum" in met.collective.label]
    met = max(gathers, key=lambda one: max(one.waiting.values()))
    last = max(met.arrivals, key=lambda rank: met.arrivals[rank])
    early = min(met.arrivals, key=lambda rank: met.arrivals[rank])
    arrived, left = met.arrivals[last], max(met.ends.values())
    margin = 0.25 * (left - met.arrivals[early])
    meeting = (
        Callout(f"rank {early} waits", met.arrivals[early], arrived, early),
        Callout(f"rank {last} has come", arrived, met.ends[last], last),
    )
    return [
        View(
            Window(met.arrivals[early] - margin, left + margin),
            meeting,
            f"One all-gather, among ranks {' and '.join(map(str, sorted(met.arrivals)))}. Rank {early} has asked for "
            f"it and waits; only when rank {last} comes can it end.",
        ),
        View(
            window(ranks, within=OPTIMIZER),
            tuple(of_muon(ranks)[1:]),
            "The optimizer's step around it: the mean gradients, then bucket by bucket; the last one holds no matrix.",
        ),
    ]


def _over(rank: RankTrace, words: str, *names: str) -> Callout:
    """Return words over a rank's ranges of these names, from the first to the last."""
    return Callout(words, *hull(activity.interval for name in names for activity in _named(rank, name)))


def _named(rank: RankTrace, name: str) -> list[Activity]:
    return sorted((activity for activity in rank.ranges if activity.name == name), key=lambda activity: activity.start)
