"""Chapter 11's five-minute puzzles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def takes_part(rank: int, owned: Sequence[Sequence[str]]) -> bool:
    """Return whether `rank` calls the gather of a bucket; owned[r]: what rank r owns pieces of."""
    return any(owned)  # the same answer on every rank


TAKES_PART = FiveMinutes(
    takes_part,
    cases=(
        (0, [["rows"], ["rows", "other"]]),
        (1, [["rows"], []]),
        (0, [[], [], ["other"]]),
        (1, [[], []]),
    ),
    nudge="A gather waits for all. Whoever decides from its own list alone leaves the others waiting.",
    goal="Decide whether a rank takes part in the gather of a bucket, so that no rank waits for ever.",
)
