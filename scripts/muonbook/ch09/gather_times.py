"""Matrices gathered over TP one by one and in one bucket, in turns: which way is quicker."""

from __future__ import annotations

import statistics

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from muonbook.measure.coalescing import GatherTimes, compare_blocks

TIMED = ((96, 32), (24, 256), (6, 1024))  # so many matrices, each so wide and high
ROUNDS = 9


def take(world: World) -> list[list[GatherTimes]] | None:
    """Gather in both ways, for every size and either cut; return whether both agree, and the times."""
    grid = Grid.of(world)
    return world.gather([compare_blocks(grid, count, width, dim, ROUNDS) for count, width in TIMED for dim in (0, 1)])


def report(found: list[list[GatherTimes]]) -> tuple[bool, None]:
    """Print one bucket's time beside that of single calls, and whether both gave the same matrices."""
    print("matrices, bf16            cut along   one bucket / one by one")
    for row in found[0]:
        print(
            f"{row.matrices:>3} of {row.width:>5} x {row.width:<5}{row.dim:>16}{statistics.median(row.ratios):>22.2f}"
        )
    right = all(row.right for rank in found for row in rank)
    print(f"Both ways gave the same matrices, bit for bit: {right}.")
    return right, None
