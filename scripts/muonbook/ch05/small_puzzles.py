"""Chapter 5's five-minute puzzles."""

from __future__ import annotations

from muonbook.puzzles.five_minutes import FiveMinutes


def groups_of_rank(rank: int, dp: int, tp: int) -> tuple[list[int], list[int]]:
    """Return this rank's DP group, a column of the grid, and its TP group, a row."""
    row, column = divmod(rank, tp)
    return list(range(column, dp * tp, tp)), list(range(row * tp, (row + 1) * tp))


GROUPS = FiveMinutes(
    groups_of_rank,
    cases=((5, 4, 2), (0, 2, 2), (3, 2, 2), (7, 3, 4), (2, 4, 1)),
    nudge="Ranks are numbered row by row, and a row has T of them: a column takes every T-th rank, a row T in turn.",
    goal="List the ranks of the data-parallel and of the tensor-parallel group that a given rank belongs to.",
)


def suspects(size: int, told: dict[int, str]) -> list[int]:
    """Return the ranks that did not wait. told: rank -> its words, if it had any."""
    return [rank for rank in range(size) if "in vain" not in told.get(rank, "")]


SUSPECTS = FiveMinutes(
    suspects,
    cases=(
        (4, {0: "in vain", 1: "in vain", 3: "in vain"}),
        (4, {0: "in vain", 1: "no error", 2: "in vain", 3: "in vain"}),
        (8, {1: "in vain", 2: "in vain", 3: "in vain", 4: "no error", 5: "in vain", 6: "in vain", 7: "in vain"}),
    ),
    nudge="Whoever complains was there; count who is missing, and who did not wait.",
    goal="Find the ranks to debug after a hang, from what the other ranks have reported.",
)
