"""Chapter 15's puzzle: choose the grid for links that nobody has described, from a few messages sent over them.

The solution is `choose_grid`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from muonbook.planner.cost_model import Collective, LinkCost, collective_seconds, collectives_of, step_seconds
from muonbook.puzzles import CaseReport, Puzzle, require, unless

if TYPE_CHECKING:
    from distmuon.sharding.grid import Grid

RANKS = 8  # of the world whose grid is to be chosen; four ranks do the choosing
PROBES = 4  # per cluster
CLUSTERS: tuple[dict[str, LinkCost], ...] = (
    {"dp": LinkCost(1e-3, 1e9), "tp": LinkCost(1e-3, 1e9)},  # one link, and messages are what costs
    {"dp": LinkCost(1e-6, 1e7), "tp": LinkCost(1e-6, 1e7)},  # one link, and bytes are what costs
    {"dp": LinkCost(5e-5, 1e8), "tp": LinkCost(3e-6, 4e11)},  # neighbours talk fast
    {"dp": LinkCost(1e-6, 1e10), "tp": LinkCost(1e-4, 1e8)},  # neighbours talk slowly
    {"dp": LinkCost(1e-5, 1e8), "tp": LinkCost(2e-3, 1e11)},  # neighbours talk fast, but only after a pause
)

Grids = Mapping[tuple[int, int], Sequence[Collective]]


def forecasts() -> dict[tuple[int, int], list[Collective]]:
    """Return, per grid of eight ranks, what one step of Muon sends over DP and TP: predicted, as in the chapter."""
    from muonbook.measure.workload import TIMED
    from muonbook.runnable_baselines import RUNNABLE

    found = {}
    for dp, tp in ((8, 1), (4, 2), (2, 4), (1, 8)):
        ledger = RUNNABLE["muon"].predict(TIMED.shared_by(RANKS), dp, tp, (0, 0))
        rows = collectives_of(ledger, {"dp": dp, "tp": tp, "world": RANKS})
        found[dp, tp] = [row for row in rows if row.group != "world"]
    return found


def trial(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Call the reader's function once per cluster, with probes that really gather, and clocks that tell its links."""
    import torch

    grids = forecasts()
    for number, links in enumerate(CLUSTERS, start=1):
        count = 0

        def probe(group: str, payload_bytes: int, links: dict[str, LinkCost] = links) -> float:
            nonlocal count
            count += 1
            good = group in links and isinstance(payload_bytes, int) and 2 <= payload_bytes <= 1 << 26
            require(
                good and payload_bytes % 2 == 0,
                f'probe({group!r}, {payload_bytes!r}): the first is "dp" or "tp", the second an even number of bytes, '
                f"2 to {1 << 26}.",
            )
            between = grid.dp if group == "dp" else grid.tp
            between.all_gather(torch.zeros(payload_bytes // 2, dtype=torch.uint8), "probe")
            return collective_seconds(Collective("all_gather", group, 2, payload_bytes), links[group])

        choice = solve(probe, {shape: list(rows) for shape, rows in grids.items()})
        known = isinstance(choice, tuple) and choice in grids
        require(known, f"choose_grid returned {choice!r}, and one of {', '.join(map(str, grids))} is wanted.")

        shapes = list(grids)
        choices = [shapes[i] for i in grid.world.all_gather(torch.tensor([shapes.index(choice)]), "choices").tolist()]
        chosen, alike = ", ".join(map(str, choices)), len(set(choices)) == 1
        took = {shape: step_seconds(0.0, rows, links) for shape, rows in grids.items()}
        times = took[choice] / min(took.values())
        complaints = [
            unless(alike, f"for cluster {number} the ranks chose {chosen}; all must choose the same."),
            unless(
                times == 1 or not alike,
                f"on cluster {number} your grid {choice} communicates {times:.1f} times as long as the best.",
            ),
            unless(count <= PROBES, f"over budget: {count} probes of cluster {number}, and {PROBES} are enough."),
        ]
        yield CaseReport(complaints, ("{} x {}".format(*choice), count))


PUZZLE = Puzzle(
    function="choose_grid",
    trial=trial,
    praise=lambda facts: (
        f"the best of four grids on each of {len(CLUSTERS)} clusters: {', '.join(grid for grid, _ in facts[0])}; "
        f"{max(count for _, count in facts[0])} probes at most."
    ),
    hints=(
        "A link has two unknowns, so two probes of different sizes tell all about it. What does each of them cost "
        "between two ranks? `cost_model.collective_seconds` says it for a link that is known.",
        "Between two ranks an all-gather is one message with half of the payload. So the difference between a large "
        "and a small probe is bytes over bandwidth, and what is left of the small one is alpha.",
        "seconds(m) = alpha + (m / 2) / bandwidth, for m of 2 bytes and of some millions. Make a LinkCost of each "
        "group, and let step_seconds(0.0, rows, links) price every grid; return the cheapest.",
    ),
    goal="Choose the grid on which Muon communicates least, after sending four messages over unknown links.",
    dp=2,
    tp=2,
)


# ---- The solution -----------------------------------------------------------------------------------------


def choose_grid(probe: Callable[[str, int], float], grids: Grids) -> tuple[int, int]:
    """Return the (dp, tp) whose collectives take least, on links known only by four probes."""
    links = {}
    for group in ("dp", "tp"):
        small, large = 2, 1 << 24
        quick, slow = probe(group, small), probe(group, large)
        bytes_per_second = (large - small) / 2 / (slow - quick)
        links[group] = LinkCost(quick - small / 2 / bytes_per_second, bytes_per_second)
    return min(grids, key=lambda shape: step_seconds(0.0, grids[shape], links))
