"""Chapter 18's five-minute puzzles: how often to save, and what to go on from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from muonbook.puzzles.five_minutes import FiveMinutes


def go_on_from(names: Sequence[str]) -> str | None:
    """Return the newest folder that is a complete checkpoint; None for none."""
    complete = [name for name in names if re.fullmatch(r"step-\d+", name)]
    return max(complete, key=lambda name: int(name.removeprefix("step-")), default=None)


GO_ON_FROM = FiveMinutes(
    go_on_from,
    cases=(
        (["step-50", "step-100"],),
        (["step-50", ".unfinished-step-100-3f09ab12"],),
        (["refused-step-150", "step-50", "step-100"],),
        (["metrics.jsonl"],),
    ),
    nudge="A name says whether a folder is complete; steps are numbers, of which letters know no order.",
    goal="Pick the newest complete checkpoint from a list of folder names.",
)


def save_every(cost: float, between_failures: float) -> float:
    """Return the interval t of least waste: cost / t for saving, t / 2 again after a failure."""
    return (2 * cost * between_failures) ** 0.5


SAVE_EVERY = FiveMinutes(
    save_every,
    cases=((2.0, 100.0), (0.5, 400.0), (1.0, 10_000.0), (8.0, 1.0)),
    nudge="The waste per second is cost / t + t / (2 between_failures). Where is its slope zero?",
    goal="Choose how often to save, so that saving and repeating lost steps together waste the least time.",
)
