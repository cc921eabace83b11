"""Chapter 18's puzzle: place a model of up to a trillion parameters, with a dozen looks at what a division would take.

The solution is `place`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from muonbook.measure import results
from muonbook.puzzles import CaseReport, Puzzle, require, unless

if TYPE_CHECKING:
    from distmuon.sharding.grid import Grid

LOOKS, CLOSE = 16, 1.10  # looks at a world; how many times the quickest step is good enough
Division = tuple[int, int, int, int]  # D, T, P, E


def trial(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Let the reader's function place every model, counting its looks."""
    for world in results.load("divisions")["worlds"]:
        table = {tuple(row["degrees"]): (row["bytes"], row["seconds"]) for row in world["divisions"]}
        looked: list[Division] = []

        def look(division: Division, table: dict[Any, Any] = table, looked: list[Any] = looked) -> tuple[int, float]:
            require(division in table, f"look({division!r}): that is none of the divisions.")
            looked.append(division)
            return table[division]

        where = f"{world['title']} on {world['ranks']:,} ranks"
        chosen = solve(sorted(table), look, world["room"])
        require(chosen in table, f"for {where}, place returned {chosen!r}; return one of the divisions, (D, T, P, E).")
        best = min(seconds for size, seconds in table.values() if size <= world["room"])
        size, seconds = table[chosen]
        complaints = [
            unless(
                size <= world["room"],
                f"{where}: {chosen} does not fit. Its fullest rank needs {size / 1e9:.0f} GB, and has "
                f"{world['room'] / 1e9:.0f}.",
            ),
            unless(len(looked) <= LOOKS, f"over budget: {len(looked)} looks at {where}, and {LOOKS} are enough."),
            unless(
                seconds <= CLOSE * best or size > world["room"],
                f"{where}: {chosen} fits, and takes {seconds / best:.2f} times as long as the quickest that does.",
            ),
        ]
        yield CaseReport(complaints, (len(table), len(looked)))


def _praise(facts: Sequence[Sequence[Any]]) -> str:
    possible, looked = map(sum, zip(*facts[0], strict=True))
    return f"{len(facts[0])} models placed, after {looked} looks at {possible} divisions."


PUZZLE = Puzzle(
    function="place",
    trial=trial,
    praise=_praise,
    hints=(
        "Begin where matrices and layers are cut often: at a large T x P. It need not fit (the first stage of a long "
        "pipeline keeps a micro-batch for every stage behind it), but what fits is not far.",
        "From one division to the next, move one factor of two: from T to D, from P to T, or double E. Neighbours take "
        "similar time, so look at neighbours, and go where it is smaller until it fits, and then where it is quicker.",
        "Try neighbours with a small T x P first: what is cut less talks less. Stop when no neighbour is better.",
    ),
    goal="Divide three models among ranks so that they fit and train quickly, looking at few divisions.",
)


# ---- The solution -----------------------------------------------------------------------------------------


def place(
    divisions: Sequence[Division],
    look: Callable[[Division], tuple[int, float]],  # -> bytes of a rank, seconds of a step
    room: float,
) -> Division:
    """Return a division that fits and is quick: go to a better neighbour as long as there is one.

    Begin with as many pieces over T and P as possible, because then a rank holds least, and with
    about 8 ranks for the experts, because then tokens stay in a node. A neighbour has one degree
    twice or half as large, or one twice and another half.
    """
    costs: dict[Division, tuple[bool, float]] = {}

    def cost(division: Division) -> tuple[bool, float]:
        if division not in costs:
            size, seconds = look(division)
            costs[division] = size > room, size if size > room else seconds
        return costs[division]

    def near(a: Division, b: Division) -> bool:
        ratios = sorted(max(x, y) // min(x, y) for x, y in zip(a, b, strict=True))
        return a != b and ratios in ([1, 1, 1, 2], [1, 1, 2, 2])

    at = min(divisions, key=lambda d: (-d[1] * d[2], abs(d[3] - 8)))
    while True:
        around = [d for d in divisions if near(d, at) and d not in costs]
        around.sort(key=lambda d: d[1] * d[2])
        better = next((d for d in around if cost(d) < cost(at)), None)
        if better is None:
            return at
        at = better
