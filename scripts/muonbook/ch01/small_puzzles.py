"""Chapter 1's five-minute puzzle."""

from __future__ import annotations

from muonbook.puzzles.five_minutes import FiveMinutes


def typical_entry(rows: int, columns: int) -> float:
    """Return the RMS of the entries of a polar factor [rows, columns], no direction missing."""
    squares = min(rows, columns)  # of the Frobenius norm: so many singular values, all 1
    return (squares / (rows * columns)) ** 0.5  # = 1 / sqrt(max(rows, columns))


TYPICAL_ENTRY = FiveMinutes(
    typical_entry,
    cases=((128, 256), (64, 64), (1000, 10)),
    nudge="How many ones are spread over how many entries?",
    goal="Compute how large a typical entry of an orthogonalized matrix is, from the shape of the matrix alone.",
)
