"""Sets of moments: unions and intersections of time intervals, which is how a trace is counted.

Durations of things that happen at the same time cannot be added: two kernels of 3 ms side by side take 3 ms. So a total
is the length of a union, and overlap the length of an intersection. An interval is (start, end), in any unit of time,
half open; an empty one (end <= start) takes no time and vanishes. A set is a list of intervals, sorted, apart.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return all moments that lie in at least one interval, as a sorted list of intervals that do not touch."""
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


def difference(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return all moments that lie in `some` and not in `others`."""
    mine = union(some)
    if not mine:
        return []
    first, last, free, at = mine[0][0], mine[-1][1], [], mine[0][0]
    for start, end in intersection(others, [(first, last)]):
        free.append((at, start))
        at = end
    return intersection(mine, [*free, (at, last)])


def length(intervals: Iterable[Interval]) -> float:
    """Return how much time the intervals cover, however often."""
    return sum(end - start for start, end in union(intervals))


def hull(intervals: Iterable[Interval]) -> Interval:
    """Return the span from the first start to the last end; (0, 0) if there is none."""
    found = union(intervals)
    return (found[0][0], found[-1][1]) if found else (0.0, 0.0)
