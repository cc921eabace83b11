"""The learning rate over a training: up in a warm-up, then down along a schedule."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "constant")
LEAST = 0.01  # of the peak


def share_of_lr(step: int, steps: int, warmup: int, schedule: str = "cosine") -> float:
    """Return by what the learning rate is multiplied at `step`, 1 to `steps`: up in `warmup` steps, then down."""
    if step <= warmup:
        return step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    down = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    return max(LEAST, down[schedule])
