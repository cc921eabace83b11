"""What a trace says: communication, computation, overlap and waiting, each moment counted once.

    communication   moments in which at least one collective runs: the length of a union, not a sum of durations
    computation     the same of everything else that works
    overlap         moments that are in both; communication without it is exposed
    busy, span      moments that are in either; from the first start to the last end; idle is what lies between

A collective's duration is not its cost: nobody can finish before the last rank has come, so one that comes early waits.
Only the traces of all ranks of the group can tell: waiting lasts until the last one has arrived, transfer from then to
the end. Early ranks may have begun to send by then, so transfer is what was left of it.
All times here are milliseconds, but intervals keep the trace's microseconds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from muonbook.measure.trace import RankTrace, TracedCollective

MS = 1e-3  # of a microsecond
OPTIMIZER = ("Optimizer.step#", "Muon_Step", "AdamW_Step")  # ranges around an optimizer's step: torch's, the report's
NAMES_MATCHED = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "reducescatter", "broadcast")
Interval = tuple[float, float]  # start and end, in any unit of time, half open; an empty one (end <= start) vanishes


# ---- Sets of moments: a total is the length of a union, overlap that of an intersection ----------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return all moments in any interval, as a sorted list of intervals that do not touch."""
    found: list[Interval] = []
    for start, end in sorted((start, end) for start, end in intervals if end > start):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def intersection(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return all moments that lie in both sets."""
    found, mine, theirs = [], union(some), union(others)
    i = j = 0
    while i < len(mine) and j < len(theirs):
        start, end = max(mine[i][0], theirs[j][0]), min(mine[i][1], theirs[j][1])
        if start < end:
            found.append((start, end))
        if mine[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return how much time the intervals cover, however often."""
    return sum(end - start for start, end in union(intervals))


def hull(intervals: Iterable[Interval]) -> Interval:
    """Return the span from the first start to the last end; (0, 0) if there is none."""
    found = union(intervals)
    return (found[0][0], found[-1][1]) if found else (0.0, 0.0)


# ---- One rank --------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """One rank's times. communication_sum: durations of the collectives added up, for comparison. longest_pause: the
    longest time between two pieces of work in which there was neither."""

    collectives: int
    communication: float
    communication_sum: float
    computation: float
    overlap: float
    busy: float
    span: float
    longest_pause: float

    @property
    def exposed(self) -> float:
        return self.communication - self.overlap

    @property
    def idle(self) -> float:
        return self.span - self.busy

    @property
    def span_without_pause(self) -> float:
        return self.span - self.longest_pause


def summarize(trace: RankTrace) -> Summary:
    """Return what one rank's trace says by itself."""
    sending = [collective.when.interval for collective in trace.collectives]
    computing = [activity.interval for activity in trace.computation]
    working = union([*sending, *computing])
    start, end = hull(working)
    found = [
        length(sending),
        sum(end - start for start, end in sending),
        length(computing),
        length(intersection(sending, computing)),
        length(working),
        end - start,
        max((after[0] - before[1] for before, after in itertools.pairwise(working)), default=0.0),
    ]
    return Summary(len(sending), *(value * MS for value in found))


def matched_by_name(trace: RankTrace) -> list[tuple[str, float]]:
    """Return (category and name, time) of every event whose name looks like a collective, the longest first.

    Their sum is what a script counts that adds up all that match: operators, annotations and kernels of the same
    collective, one on top of the other.
    """
    found = {
        f"{category}: {name}": MS * sum(durations)
        for (category, name), durations in trace.by_name.items()
        if any(pattern in name.lower() for pattern in NAMES_MATCHED)
    }
    return sorted(found.items(), key=lambda part: -part[1])


class RangeTimes(NamedTuple):
    """A named range: how long the host was in it, and the GPU, from the first to the last kernel launched in it.

    The host only launches kernels: on a GPU the first number is small whatever the work costs. computing: how long of
    `gpu` the GPU computed; the rest are collectives and gaps. Both are None where no kernel was launched in the range
    directly, or there is no GPU.
    """

    calls: int
    host: float
    gpu: float | None
    computing: float | None


def range_times(trace: RankTrace) -> dict[str, RangeTimes]:
    """Return the times of every named range of the host, ranges of one name taken together."""
    names = dict.fromkeys(activity.name for activity in trace.ranges)
    return {name: _range_times(trace, (name,), whole=True) for name in names}


def optimizer_times(trace: RankTrace) -> RangeTimes:
    """Return the times of the optimizer's steps."""
    return _range_times(trace, OPTIMIZER, whole=False)


def _range_times(trace: RankTrace, names: tuple[str, ...], whole: bool) -> RangeTimes:
    host, gpu = (
        [a.interval for a in activities if (a.name in names if whole else a.name.startswith(names))]
        for activities in (trace.ranges, trace.shadows)
    )
    if not gpu:
        return RangeTimes(len(host), length(host) * MS, None, None)
    computing = intersection(gpu, (activity.interval for activity in trace.computation))
    return RangeTimes(len(host), *(length(part) * MS for part in (host, gpu, computing)))


class Meeting(NamedTuple):
    """One collective as all ranks of its group lived through it, by global rank. arrivals, ends: microseconds."""

    collective: TracedCollective
    arrivals: dict[int, float]
    ends: dict[int, float]

    @property
    def group(self) -> tuple[int, ...]:
        return tuple(self.arrivals)

    @property
    def waiting(self) -> dict[int, float]:
        """How long each rank was inside before the last one arrived; it may have sent to others by then."""
        last = max(self.arrivals.values())
        return {rank: (min(last, self.ends[rank]) - start) * MS for rank, start in self.arrivals.items()}

    @property
    def transfer(self) -> dict[int, float]:
        """How long each rank was inside after the last one had arrived."""
        last = max(self.arrivals.values())
        return {rank: max(end - last, 0.0) * MS for rank, end in self.ends.items()}


def meetings(traces: Sequence[RankTrace]) -> list[Meeting]:
    """Return the collectives whose group is complete among these traces of one run, in order of the first arrival.

    The n-th collective of a group on one rank is the n-th on the others. A group of which a rank is missing, or of
    which the ranks do not show equally many collectives, is left out: nothing is guessed.
    """
    ranks = {trace.rank: trace for trace in traces}
    met: list[Meeting] = []
    for group, name in sorted({(c.group, c.queue) for trace in traces for c in trace.collectives if c.group}):
        if not ranks.keys() >= set(group):
            continue
        queues = {rank: _queue(ranks[rank], group, name) for rank in group}
        if len({len(queue) for queue in queues.values()}) > 1:
            continue
        for together in zip(*queues.values(), strict=True):
            whens = dict(zip(queues, (c.when for c in together), strict=True))
            arrivals, ends = ({rank: when[at] for rank, when in whens.items()} for at in (2, 3))
            met.append(Meeting(together[0], arrivals, ends))
    return sorted(met, key=lambda meeting: min(meeting.arrivals.values()))


def _queue(trace: RankTrace, group: tuple[int, ...], name: str) -> list[TracedCollective]:
    mine = (c for c in trace.collectives if (c.group, c.queue) == (group, name))
    return sorted(mine, key=lambda collective: collective.sequence)


def by_group(met: Sequence[Meeting]) -> list[list[Meeting]]:
    """Return the meetings of each group, groups in order of their ranks."""
    found: dict[tuple[Any, str], list[Meeting]] = defaultdict(list)
    for meeting in met:
        found[meeting.collective.group, meeting.collective.queue].append(meeting)
    return [found[key] for key in sorted(found)]


def clocks_disagree(met: Sequence[Meeting]) -> float:
    """Return the longest time by which a rank seems to leave a collective before the last one has arrived; 0 is good.

    No rank can leave an all-gather, all-reduce or all-to-all early, so whatever is found here is an error of the
    clocks, and waiting is known no better than that. (A broadcast's root may leave early.)
    """
    early = [max(m.arrivals.values()) - min(m.ends.values()) for m in met if m.collective.op.strip("_") != "broadcast"]
    return max([0.0, *early]) * MS


def runs(files: Sequence[Sequence[RankTrace]]) -> list[list[RankTrace]]:
    """Return traces that belong together: a merged file by itself; else files of different ranks at the same time."""
    found = [list(traces) for traces in files if len(traces) > 1]
    single = sorted((traces[0] for traces in files if len(traces) == 1), key=lambda trace: trace.rank)
    alone: list[list[RankTrace]] = []
    for trace in single:
        for run in alone:
            apart = all(trace.rank != other.rank for other in run)
            if apart and intersection([_hull(trace)], [_hull(run[0])]):
                run.append(trace)
                break
        else:
            alone.append([trace])
    return found + alone


def _hull(trace: RankTrace) -> Interval:
    work = itertools.chain(trace.computation, (collective.when for collective in trace.collectives))
    return hull(activity.interval for activity in work)
