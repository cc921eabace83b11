"""What one bucket gains over a call per matrix, where the same matrices are divided over DP, or cut over TP."""

from __future__ import annotations

from typing import Any

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from muonbook.measure import results
from muonbook.measure.coalescing import compare_blocks, compare_shards

MATRICES = 12  # bf16
WIDTHS = (32, 64, 128, 256, 512, 1024)  # the largest bucket has 25 MB
CUTS = {"rows": 0, "columns": 1}  # dimension that is cut over TP


def race(world: World, rounds: int) -> dict[str, Any] | None:
    """Gather in both ways, every width; on rank 0, return {"rows": {width: spread of ratios}, ...}; over DP: "shards".

    Raises ValueError where a way gave wrong matrices.
    """
    grid, found = Grid.of(world), dict[str, Any]()
    for width in WIDTHS:
        if grid.tp.size == 1:
            rows = {"shards": compare_shards(grid, MATRICES, width, rounds)}
        else:
            rows = {name: compare_blocks(grid, MATRICES, width, dim, rounds) for name, dim in CUTS.items()}
        for name, times in rows.items():
            if not times.right:
                raise ValueError(f"{name} of {width} x {width}: the gathered matrices are wrong.")
            found.setdefault(name, {})[str(width)] = results.spread(times.ratios)
    return None if world.rank else found
