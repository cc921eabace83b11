"""Chapter 2's five-minute puzzle."""

from __future__ import annotations

from distmuon.optim.coefficients import MUON
from muonbook.puzzles.five_minutes import FiveMinutes


def iterations_until(s: float, goal: float) -> int:
    """Return how many of Muon's iterations take a singular value from s to the goal, or beyond."""
    a, b, c = MUON
    count = 0
    while s < goal:
        s, count = a * s + b * s**3 + c * s**5, count + 1
    return count


ITERATIONS_UNTIL = FiveMinutes(
    iterations_until,
    cases=((0.3, 0.7), (0.001, 0.5), (0.000001, 0.5)),
    nudge="As long as s is below the goal, apply p to it and count.",
    goal="Count the iterations that lift a singular value to a given size.",
)
