"""The stages of a pipeline decide on a step together: one norm, one answer to what is not finite, one refusal.

Each stage has a grid and an optimizer of its own. `Grid.with_stages` lets it know the others: the ranks that have this
rank's place in theirs.
"""

from __future__ import annotations

from dataclasses import replace

from distmuon.sharding.collectives import numbers_on
from distmuon.sharding.consistency import Lines, checksum
from distmuon.sharding.gradients import GradientStatistics, StageSummary
from distmuon.sharding.grid import Grid
from distmuon.sharding.precision import widest

STAGES_LABEL = "stages' summaries"  # in ledgers


def gather_summaries(statistics: GradientStatistics, grid: Grid, step: Lines, refused: bool) -> GradientStatistics:
    """Return the statistics with what all pipeline stages say; they are gathered, since a sum has no fixed order.

    step: what all stages must have alike. refused: whether this one will not make it. Collective, over `grid.stages`.
    """
    stages, device = grid.stages, grid.device
    if stages.size == 1:
        return statistics
    wide = widest(device)
    digest, _ = checksum(step, stages.size, wide)
    squares = float(statistics.squared_norms.sum())
    row = [squares, float(not statistics.non_finite), float(statistics.agreed and not refused), digest]
    rows = stages.all_gather(numbers_on(device, row, wide), STAGES_LABEL).view(stages.size, len(row)).tolist()
    summaries = [StageSummary(squares, finite > 0, agreed > 0, digest) for squares, finite, agreed, digest in rows]
    return replace(statistics, stages=summaries)
