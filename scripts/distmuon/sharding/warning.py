"""Warnings that point at a line of the user's, who can do something about it, and at none of torch's or ours."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

INSIDE = ("torch", "distmuon")  # packages whose lines are passed over


def warn_user(words: str, category: type[Warning] = UserWarning) -> None:
    """Warn as of the innermost line on the stack that is neither torch's nor ours."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(words, category, stacklevel=level)


def warn_of_formats(names: Sequence[str]) -> None:
    """Warn of kernels that have left the memory format in which their model had them."""
    more = f" and {len(names) - 1} more" if names[1:] else ""
    warn_user(
        f"parameter {names[0]!r}{more} has another memory format, as under torch.channels_last, and a sharded "
        "optimizer lays parameters out row by row: the numbers are the same, and a convolution may be slower; "
        "MuonW leaves parameters as they are.",
    )
