"""Chapter 14's five-minute puzzle: how much communication is hidden."""

from __future__ import annotations

from collections.abc import Sequence

from muonbook.measure.trace_report import Interval, length
from muonbook.puzzles.five_minutes import FiveMinutes


def hidden(sending: Sequence[Interval], computing: Sequence[Interval]) -> float:
    """Return for how long the rank was both in a collective, however many, and computing."""
    return length(sending) + length(computing) - length([*sending, *computing])  # lengths of unions


HIDDEN = FiveMinutes(
    hidden,
    cases=(([(0, 4)], [(2, 6)]), ([(0, 4), (1, 5)], [(2, 6)]), ([(0, 9)], [(1, 2), (1, 3), (8, 12)]), ([], [(0, 1)])),
    nudge="Two collectives at the same time hide under the same work, and its time passes once.",
    goal="Measure for how long a rank communicated and computed at once, even if its collectives overlap.",
)
