"""The learning rate over a training, as a share of its peak: up in a warm-up, then down along a schedule."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "constant")


def share_at(step: int, steps: int, warmup: int, schedule: str = "cosine", least: float = 0.0) -> float:
    """Return the share at `step`, 1 to `steps`, of which the first `warmup` climb. least: of the steps after these."""
    if step <= warmup:
        return step / warmup
    done, left = step - warmup, max(1, steps - warmup)
    down = {"cosine": (1 + math.cos(math.pi * done / left)) / 2, "linear": 1 - done / left, "constant": 1.0}
    return max(least, down[schedule])
