"""Chapter 3's five-minute puzzle: what Nesterov looks ahead to."""

from __future__ import annotations

from typing import TypeVar

import torch

from muonbook.puzzles.five_minutes import FiveMinutes

Number = TypeVar("Number", float, torch.Tensor)


def one_step_later(M: Number, G: Number, mu: float) -> Number:
    """Return the momentum after this step and the next, if both bring the gradient G."""
    now = mu * M + G
    return mu * now + G  # what Nesterov feeds today


ONE_STEP_LATER = FiveMinutes(
    one_step_later,
    cases=((4.0, 1.0, 0.5), (0.0, 2.0, 0.95), (torch.tensor([[1.0, -3.0]]), torch.tensor([[0.5, 2.0]]), 0.9)),
    nudge="The next step does the same to that once more.",
    goal="Compute the momentum that we would have one step later if the same gradient came again.",
)
