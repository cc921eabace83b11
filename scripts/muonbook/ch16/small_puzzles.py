"""Chapter 16's five-minute puzzle: how quick the slowest rank can be, at best."""

from __future__ import annotations

from collections.abc import Sequence

from muonbook.puzzles.five_minutes import FiveMinutes


def least(costs: Sequence[float], ranks: int) -> float:
    """Return a time below which no division of these costs can bring the slowest rank."""
    return max(sum(costs) / ranks, max(costs))  # a fair share, and some rank has the largest


LEAST = FiveMinutes(
    least,
    cases=(([3, 3, 3, 3], 2), ([9, 1, 1, 1], 4), ([5, 4, 3], 3)),
    nudge="One rank has to do all of the most expensive matrix.",
    goal="Find a time below which no division of the matrices among the ranks can bring the slowest rank.",
)
