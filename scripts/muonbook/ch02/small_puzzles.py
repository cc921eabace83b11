"""Chapter 2's five-minute puzzles."""

from __future__ import annotations

import torch
from torch import Tensor

from distmuon.optim.coefficients import MUON, Quintic
from muonbook.puzzles.five_minutes import FiveMinutes

SQUARE, WIDE = ([[0.5, 0.0], [0.0, 0.25]], [[0.5, 0.0, 0.5], [0.0, 0.25, 0.0]])


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


def one_iteration(x: Tensor, quintic: Quintic) -> Tensor:
    """Return a X + (b A + c A^2) X with A = X X^T."""
    a, b, c = quintic
    gram = x @ x.mT
    return a * x + (b * gram + c * gram @ gram) @ x


ONE_ITERATION = FiveMinutes(
    one_iteration,
    cases=((torch.tensor(SQUARE), (1.0, -1.0, 2.0)), (torch.tensor(WIDE), (2.0, -1.0, 1.0))),
    nudge="On a diagonal matrix it is p of every entry: 0.5 becomes a/2 + b/8 + c/32.",
    goal="Repair one iteration of Newton–Schulz, in which a term is wrong.",
)
