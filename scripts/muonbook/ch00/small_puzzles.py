"""Chapter 0's five-minute puzzle."""

from __future__ import annotations

import math

from muonbook.puzzles.five_minutes import FiveMinutes


def kept(lengths: list[int], D: int, dp: int) -> list[int]:
    """Return how many numbers of each matrix DP rank `dp` keeps. lengths: of its parts."""
    shard_length = math.ceil(sum(lengths) / D)
    start, stop = dp * shard_length, (dp + 1) * shard_length  # of the shard
    pieces, a = [], 0
    for length in lengths:
        b = a + length  # the matrix stands at a to b
        pieces.append(max(0, min(b, stop) - max(a, start)))
        a = b
    return pieces


KEPT = FiveMinutes(
    kept,
    cases=(([6144, 6144, 6144], 4, 1), ([6144, 6144, 6144], 4, 3), ([5, 2, 4], 3, 1), ([5, 2, 4], 3, 2), ([3], 8, 7)),
    nudge="In the bucket a matrix runs from a to b and a shard from c to d. What do they share?",
    goal="Count how many numbers of each matrix a rank keeps, when a shard may end inside a matrix.",
)
