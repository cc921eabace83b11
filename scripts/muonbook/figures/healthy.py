"""Where five of Muon's quintics leave singular values: the band that chapter 2 measures and chapter 11 listens for."""

from __future__ import annotations

from typing import Any

HEALTHY = (0.68, 1.20)  # rounded; chapter 2's notebook compares it with the ends that it finds


def is_healthy(values: Any) -> Any:
    """Return whether a singular value, or each of an array, lies in the band, whose ends are rounded."""
    return (values > HEALTHY[0] - 0.005) & (values < HEALTHY[1] + 0.005)
