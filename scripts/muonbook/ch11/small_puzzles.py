"""Chapter 11's five-minute puzzle: a check that needs no reference."""

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
    goal="Name the parameters that a step has not moved, which is a check that needs no reference.",
)
