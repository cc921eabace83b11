"""Chapter 11's five-minute puzzles."""

from __future__ import annotations

from collections.abc import Mapping

from muonbook.puzzles.five_minutes import FiveMinutes


def stood_still(before: Mapping[str, list[float]], after: Mapping[str, list[float]]) -> list[str]:
    """Return the names of the parameters that a step has not moved."""
    return [name for name in before if after[name] == before[name]]


STOOD_STILL = FiveMinutes(
    stood_still,
    cases=(
        ({"w": [1.0, 2.0], "v": [3.0]}, {"w": [1.0, 2.0], "v": [2.5]}),
        ({"w": [1.0, 2.0], "v": [3.0]}, {"w": [1.0, 1.5], "v": [3.0]}),
        ({"w": [1.0], "v": [3.0]}, {"w": [0.5], "v": [2.5]}),
    ),
    nudge="A parameter has moved if any of its elements has.",
)


def ranks_with_a_piece(start: int, numel: int, shard: int) -> int:
    """Return how many DP ranks own a piece of a matrix that begins at `start` of its bucket."""
    return (start + numel - 1) // shard - start // shard + 1


RANKS_WITH_A_PIECE = FiveMinutes(
    ranks_with_a_piece,
    cases=((0, 60, 100), (60, 60, 100), (0, 100, 100), (90, 120, 100), (95, 10, 100)),
    nudge="Which shard holds its first element, and which its last?",
)
