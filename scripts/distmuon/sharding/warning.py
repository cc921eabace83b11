"""Warnings that point at a line of the user's, who can do something about it, and at none of torch's or ours."""

from __future__ import annotations

import sys
import warnings

INSIDE = ("torch", "distmuon")  # packages whose lines are passed over


def warn_user(words: str, category: type[Warning] = UserWarning) -> None:
    """Warn as of the innermost line on the stack that is neither torch's nor ours."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(words, category, stacklevel=level)
