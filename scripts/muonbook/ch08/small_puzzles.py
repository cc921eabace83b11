"""Chapter 8's five-minute puzzle."""

from __future__ import annotations

from muonbook.puzzles.five_minutes import FiveMinutes


def owners(start: int, end: int, shard_size: int) -> int:
    """Return how many ranks own an element of start:end."""
    first = start // shard_size
    last = (end - 1) // shard_size  # the last element is end - 1
    return last - first + 1


OWNERS = FiveMinutes(
    owners,
    cases=((12, 32, 9), (0, 12, 9), (0, 9, 9), (9, 18, 9), (3, 4, 9), (0, 1000, 8)),
    nudge="Which rank owns the first element, and which the last one?",
)
