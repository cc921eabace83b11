"""Two runs that only rounding may keep apart, beside a control that shows how far rounding does. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOAT64_BOUND, CONTROL_FACTOR = 1e-10, 4.0  # what a certificate allows: of the movement; times the control
POWERLESS = 0.3  # of the movement: a bound this wide holds nothing back
FEW_STEPS = 10  # rounding to bf16 may not have begun to tell before; what is not rounded needs no more


@dataclass(frozen=True)
class Drift:
    """How far a run is from its reference, and how far rounding alone moves the control; both of the movement."""

    difference: float
    control: float

    @property
    def passed(self) -> bool | None:
        """Whether the run is within its bound; None where that is too wide to say: no power, neither pass nor fail."""
        allowed = CONTROL_FACTOR * self.control
        if allowed >= POWERLESS and math.isfinite(self.difference):
            return None
        return self.difference <= allowed < POWERLESS
