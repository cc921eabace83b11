"""How even is the work? A column per rank, a box per matrix, and the height that would be fair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from distmuon.sharding.ownership import balance
from muonbook.figures.player import Frame
from muonbook.figures.style import ACCENT, CARD, INK, MARGIN, MUTED, SMALL, TEXT, WIDTH

from muonbook.figures.style import box, dp_colour, page, put  # isort: skip

TALLEST, ABOVE, BELOW = 170.0, 44.0, 26.0  # the tallest column of all frames; room for words above and below


def frames_of_balance(costs: Mapping[int, float], worlds: Sequence[int]) -> list[Frame]:
    """Return a frame for each number of ranks over which the matrices are dealt. costs: {matrix: cost}, any unit."""
    largest = max(max(loads(costs, ranks)) for ranks in worlds)
    return [_frame(costs, ranks, TALLEST / largest) for ranks in worlds]


def loads(costs: Mapping[int, float], ranks: int) -> list[float]:
    """Return the work of each rank."""
    found = [0.0] * ranks
    for item, rank in balance(costs, ranks).items():
        found[rank] += costs[item]
    return found


def _frame(costs: Mapping[int, float], ranks: int, scale: float) -> Frame:
    found, fair = loads(costs, ranks), sum(costs.values()) / ranks
    over = max(found) / fair
    idle = sum(load == 0 for load in found)
    pitch = (WIDTH - 2 * MARGIN) / ranks
    if idle:
        caption = f"{ranks} ranks: {idle} have nothing to do. No dealing helps: a matrix has one owner."
    elif over > 1.005:
        caption = f"{ranks} ranks: the slowest works {over:.3g} times its fair share."
    else:
        caption = f"{ranks} ranks: everybody works as long as everybody else."

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top, f"{len(costs)} matrices, {ranks} ranks", bold=True, size=TEXT)
        put(axes, WIDTH - MARGIN, top + 2, f"slowest / fair: {over:.2f}", "right", color=MUTED, size=SMALL)
        floor = top + ABOVE + TALLEST
        filled = [0.0] * ranks
        for item, rank in balance(costs, ranks).items():
            high = costs[item] * scale
            x, y = MARGIN + pitch * rank, floor - filled[rank] - high
            box(axes, x + 0.1 * pitch, y, 0.8 * pitch, high, dp_colour(rank), ec=CARD, lw=1.0)
            filled[rank] += high
        axes.hlines([floor - fair * scale], MARGIN, WIDTH - MARGIN, ACCENT, linestyles=(0, (4, 2)), lw=1.6)
        axes.hlines([floor], MARGIN, WIDTH - MARGIN, INK, lw=1.0)
        put(axes, MARGIN, floor + 7, "dashed: the fair share", color=ACCENT)

    alt = (
        f"{len(costs)} matrices over {ranks} ranks: the slowest has {over:.2f} of its fair share, {idle} have nothing."
    )
    return Frame(page([(ABOVE + TALLEST + BELOW, paint)]), alt, caption)
