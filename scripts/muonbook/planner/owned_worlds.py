"""Planned worlds in which a matrix has one owner, the strategy `owner`, on every rank of the grid.

The map cuts no matrix, so DP ranks hold unequal parts of a padded bucket, and the TP ranks of a row do unequal work:
what differs from rank to rank is added up, matrix by matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distmuon.optim import strategies
from distmuon.optim.strategies.costs import PlannedRank, WholeMatrices
from distmuon.optim.strategies.owner import assign_owners, owner_bound, work
from distmuon.sharding.layout import ParamSpec
from distmuon.sharding.ownership import Owner
from muonbook.planner.planned_worlds import (
    COMPUTE_BYTES,
    MOMENTUM_BYTES,
    Load,
    Matrix,
    PlannedWorld,
    undominated,
    whole_sizes,
)
from muonbook.planner.priced_worlds import PricedWorld


@dataclass(frozen=True)
class OwnedWorld(PlannedWorld):
    """A planned world whose strategy is "owner": a row, a DP rank with all its TP ranks, holds all of a matrix, and one
    of them orthogonalizes it."""

    @property
    def has_owners(self) -> bool:
        return True

    @cached_property
    def owner_of(self) -> dict[int, Owner]:
        """Who orthogonalizes each matrix."""
        return assign_owners(self.layout, self.muon, self.tp)

    def _rank(self, row: Matrix) -> slice:
        """Return who orthogonalizes a matrix, among all D x T ranks."""
        owner = self.owner_of[row.place].tp
        assert owner is not None, "planned matrices are whole ones"
        rank = self.tp * row.owners.start + owner
        return slice(rank, rank + 1)

    def _load(self, spec: ParamSpec) -> Load:
        """Return what a matrix costs who orthogonalizes it; what is sent for it differs from rank to rank of a row."""
        return Load(0, 0, work(spec.whole_parts(self.tp)))

    @cached_property
    def loads(self) -> list[np.ndarray]:
        """As `PlannedWorld.loads`, [3, D x T]: blocks to their owners, Newton–Schulz, blocks of the updates back."""
        found = []
        for _, rows in self.matrices:
            calls, sent, operations = columns = np.zeros((len(Load._fields), self.dp * self.tp), np.int64)
            for row in rows:
                mine = self._rank(row)
                operations[mine] += row.load.flops
                if self.tp == 1:
                    continue
                everybody = slice(self.tp * row.owners.start, self.tp * (row.owners.start + 1))
                sent[mine] += MOMENTUM_BYTES * (self.tp - 1) * row.numel
                calls[everybody] = np.maximum(calls[everybody], 1)
                if self.layout.specs[row.place].tp_gather_dim is not None:
                    sent[everybody] += MOMENTUM_BYTES * row.numel
                    sent[mine] -= MOMENTUM_BYTES * row.numel
                    calls[everybody] = 2
            found.append(columns)
        return found

    def momentum_sent(self) -> list[np.ndarray]:
        """Return nothing: over DP, matrices are whole where they are."""
        return []

    @property
    def redundancy(self) -> float:
        """1: nobody repeats anything."""
        return 1.0

    @property
    def transient_bytes(self) -> int:
        worst, specs = 0, self.layout.specs
        for bucket, rows in self.matrices:
            sizes = PlannedRank(self.layout, self.muon).momentum_bytes(bucket)
            own = np.zeros(self.dp, np.int64)
            for row in rows:
                own[row.slice] += row.numel
            parts = ((self._rank(row), WholeMatrices.of_one(specs[row.place], self.tp)) for row in rows)
            columns = np.stack([np.repeat(own, self.tp), *whole_sizes(self.dp * self.tp, parts)])
            for mine, *whole in undominated(columns):
                worst = max(worst, owner_bound(mine, WholeMatrices(*whole), sizes, COMPUTE_BYTES))
        return worst


# ---- By the name of the strategy ----

QUICK: dict[str, type[PlannedWorld]] = {  # strategies whose COSTS are written down for all ranks at once, too
    "gather_all": PlannedWorld,
    "gather_cut": PlannedWorld,
    "owner": OwnedWorld,
}


def plan_part(
    specs: Sequence[ParamSpec], muon: Collection[int], dp: int, tp: int, bucket_size: int, strategy: str
) -> PlannedWorld:
    """Return these TP-local parameters, laid out by a strategy's own planner. muon: indices of Muon's.

    strategy: a name, or the path of a file. bucket_size: elements. Raises ValueError as the planner does, and for a
    strategy that does not say what it costs.
    """
    strategies.priced(strategy)
    layout = strategies.planner(strategy)(specs, muon, dp, tp, bucket_size)
    return QUICK.get(strategy, PricedWorld)(dp, tp, layout, frozenset(muon), strategy)
