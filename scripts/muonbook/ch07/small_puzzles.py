"""Chapter 7's five-minute puzzles."""

from __future__ import annotations

from muonbook.puzzles.five_minutes import FiveMinutes


def padded_length(numel: int, dp: int) -> int:
    """Return the least multiple of `dp` that is not less than `numel`."""
    return -(-numel // dp) * dp  # // rounds down; asked about -numel, it rounds up


PADDED_LENGTH = FiveMinutes(
    padded_length,
    cases=((104, 4), (6, 4), (110, 4), (105, 5), (3, 8)),
    nudge="Which is the least multiple of dp that holds numel?",
)


def own_part(start: int, end: int, rank: int, shard_size: int) -> tuple[int, int]:
    """Return what of start:end lies in the shard of `rank`, counted from its start."""
    first = rank * shard_size  # move the ruler, then cut off what lies outside
    a, b = max(start - first, 0), min(end - first, shard_size)
    return (a, b) if a < b else (0, 0)


OWN_PART = FiveMinutes(
    own_part,
    cases=((0, 48, 0, 26), (0, 48, 1, 26), (56, 104, 2, 26), (56, 104, 1, 26), (10, 100, 2, 26)),
    nudge="Count from the shard's start, and stay inside it.",
)
