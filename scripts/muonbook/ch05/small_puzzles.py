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
    nudge="Ranks are numbered row by row, and a row has T of them, so a column has every T-th rank.",
    goal="List the ranks of the data-parallel and of the tensor-parallel group that a given rank belongs to.",
)


def suspects(size: int, reports: dict[int, str]) -> list[int]:
    """Return the ranks that did not wait. reports: rank -> its message, if it printed one."""
    return [rank for rank in range(size) if "stopped waiting" not in reports.get(rank, "")]


IN_IT = "stopped waiting"
SUSPECTS = FiveMinutes(
    suspects,
    cases=(
        (4, dict.fromkeys((0, 1, 3), IN_IT)),
        (4, dict.fromkeys((0, 2, 3), IN_IT) | {1: "no error"}),
        (8, dict.fromkeys((1, 2, 3, 5, 6, 7), IN_IT) | {4: "no error"}),
    ),
    nudge="A rank that stopped waiting was in the collective, so look for a rank that said nothing or did not wait.",
    goal="Find the ranks to debug after a hang, from what the other ranks have reported.",
)
