"""Chapter 16's puzzle: divide matrices so that the slowest rank is quick, and all ranks agree without communicating.

The solution is `deal`, at the end of this file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from muonbook.puzzles import CaseReport, Puzzle, require, unless

if TYPE_CHECKING:
    from distmuon.sharding.grid import Grid

SQUARE, WIDE = 30, 90  # Newton–Schulz on [m, m] and on [m, 4 m], in m^3
MODELS: tuple[tuple[str, list[int], int], ...] = (  # name, costs, ranks
    ("a transformer of four blocks on 8 ranks", ([SQUARE] * 4 + [WIDE] * 2) * 4, 8),
    ("the same on 5 ranks", ([SQUARE] * 4 + [WIDE] * 2) * 4, 5),
    ("sizes 2 to 13 on 3 ranks", [2, 13, 3, 11, 5, 7, 2, 9, 4, 4, 6, 12], 3),
    ("one giant and twelve dwarfs on 4 ranks", [60] + [5] * 12, 4),
    ("three matrices on 8 ranks", [7, 5, 7], 8),
)


def slowest(costs: Mapping[int, float], dealt: Mapping[int, int]) -> float:
    """Return the work of the rank that has most."""
    loads: dict[int, float] = {}
    for item, rank in dealt.items():
        loads[rank] = loads.get(rank, 0) + costs[item]
    return max(loads.values())


def trial(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Call the reader's function once per model, with the matrices listed in another order on every rank."""
    import torch

    from distmuon.sharding.ownership import balance

    for name, sizes, ranks in MODELS:
        costs = dict(enumerate(sizes))
        order = list(costs)
        random.Random(grid.world.rank).shuffle(order)
        dealt = solve({item: costs[item] for item in order}, ranks)
        whole = isinstance(dealt, Mapping) and set(dealt) == set(costs)
        require(whole, f"deal returned {dealt!r}; a rank for each of the matrices 0 to {len(costs) - 1} is wanted.")
        wrong = [rank for rank in dealt.values() if not (isinstance(rank, int) and 0 <= rank < ranks)]
        require(not wrong, f"for {name}, a matrix went to rank {wrong[:1]}; there are 0 to {ranks - 1}.")

        mine = torch.tensor([dealt[item] for item in range(len(costs))])
        rows = grid.world.all_gather(mine, "owners").view(grid.world.size, len(costs))
        alike = bool((rows == rows[0]).all())
        took, enough = slowest(costs, dealt), slowest(costs, balance(costs, ranks))
        complaints = [
            unless(
                alike,
                f"for {name} the ranks disagree, so one matrix would be orthogonalized twice and another not at all.",
            ),
            unless(took <= enough, f"for {name} your slowest rank works {took:g}, but {enough:g} is possible."),
        ]
        yield CaseReport(complaints, f"{took:g}")


PUZZLE = Puzzle(
    function="deal",
    trial=trial,
    praise=lambda facts: f"the slowest rank of {len(MODELS)} models works {', '.join(facts[0])}, and all ranks agree.",
    hints=(
        "Two ranks list the same matrices in different orders. By what could both sort? Costs alone are not enough, "
        "because equal costs stay in the order in which they came.",
        "Every matrix has a number, and that number is the same on all ranks.",
        "Sort by (-cost, number). Keep a load per rank; give each matrix to the rank with the least (load, rank).",
    ),
    goal="Divide matrices among ranks so that the slowest rank is quick and all ranks agree without communicating.",
    dp=2,
    tp=1,
)


# ---- The solution -----------------------------------------------------------------------------------------


def deal(costs: Mapping[int, float], ranks: int) -> dict[int, int]:
    """Return {matrix: rank}: the most expensive first, each to the rank that has least so far."""
    loads = [0.0] * ranks
    owner = {}
    for item in sorted(costs, key=lambda item: (-costs[item], item)):
        rank = loads.index(min(loads))
        owner[item] = rank
        loads[rank] += costs[item]
    return owner
