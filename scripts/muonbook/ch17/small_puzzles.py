"""Chapter 17's five-minute puzzle: which rows of a matrix FSDP2 gives to a rank."""

from __future__ import annotations

from muonbook.puzzles.five_minutes import FiveMinutes


def my_rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return where this rank's rows begin and end, as torch.chunk cuts."""
    most = -(-rows // ranks)
    return min(rank * most, rows), min((rank + 1) * most, rows)


MY_ROWS = FiveMinutes(
    my_rows,
    cases=((8, 4, 1), (7, 4, 3), (9, 4, 2), (9, 4, 3), (2, 4, 3)),
    nudge="Each rank gets as many rows as the first, while there are any: nine rows on four ranks are 3, 3, 3, 0.",
    goal="Find where a rank's rows of a matrix begin and end under FSDP2, even if the ranks do not divide them.",
)
