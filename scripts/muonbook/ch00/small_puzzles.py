"""Chapter 0's five-minute puzzle."""

from __future__ import annotations

from muonbook.puzzles.five_minutes import FiveMinutes


def kept(lengths: list[int], D: int, dp: int) -> list[int]:
    """Return how many numbers of each matrix DP rank `dp` keeps. lengths: of the parts."""
    n = -(-sum(lengths) // D)  # of a shard; the last may end in padding
    pieces, a = [], 0
    for length in lengths:
        piece = range(max(a, dp * n), min(a + length, (dp + 1) * n))  # both the matrix's and mine
        pieces.append(len(piece))
        a += length
    return pieces


KEPT = FiveMinutes(
    kept,
    cases=(([6144, 6144, 6144], 4, 1), ([6144, 6144, 6144], 4, 3), ([5, 2, 4], 3, 1), ([5, 2, 4], 3, 2), ([3], 8, 7)),
    nudge="In the bucket a matrix runs from a to b and a shard from c to d. What do they share?",
    goal="Count how many numbers of each matrix a rank keeps, when a shard may end inside a matrix.",
)
