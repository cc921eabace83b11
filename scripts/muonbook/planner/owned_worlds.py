"""Planned worlds in which a matrix has one owner: the strategies `owner` and `blockwise`, on every rank of the grid.

The map cuts no matrix, so DP ranks hold unequal parts of a padded bucket, and the TP ranks of a row do unequal work:
what differs from rank to rank is added up, matrix by matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from distmuon.optim import strategies
from distmuon.optim.strategies.costs import PlannedRank, WholeMatrices
from distmuon.optim.strategies.owner import assign_owners, owner_bound, work
from distmuon.sharding.layout import Bucket, ParamSpec
from distmuon.sharding.ownership import Owner
from muonbook.planner.planned_worlds import COMPUTE_BYTES, MOMENTUM_BYTES, Load, PlannedWorld, undominated


@dataclass(frozen=True)
class OwnedWorld(PlannedWorld):
    """A planned world whose strategy is "owner" or "blockwise". Rows are DP ranks with all their TP ranks."""

    has_owners: ClassVar[bool] = True

    @cached_property
    def owner_of(self) -> dict[int, Owner]:
        """Who orthogonalizes each matrix of `owner`."""
        return assign_owners(self.layout, self.muon, self.tp)

    @cached_property
    def rows(self) -> list[tuple[Bucket, dict[int, list[int]]]]:
        """Muon's matrices, by bucket, and in it by the row that holds them whole."""
        found = []
        for bucket in self.layout.buckets:
            rows: dict[int, list[int]] = {}
            for index in bucket.params:
                if index in self.muon:
                    rows.setdefault(self.layout.owners(bucket, index).start, []).append(index)
            if rows:
                found.append((bucket, rows))
        return found

    @cached_property
    def row_loads(self) -> list[dict[int, list[Load]]]:
        """What the TP ranks of a row do, by bucket as in `rows`: {row: a load for each}."""
        costs: dict[tuple, int] = {}
        for index in self.muon:
            spec = self.layout.specs[index]
            if spec[1:] not in costs:  # all but its name
                parts = spec.local_parts if self.strategy == "blockwise" else spec.whole_parts(self.tp)
                costs[spec[1:]] = work(parts)
        load = self._blocks_load if self.strategy == "blockwise" else self._owners_load
        return [{row: load(indices, costs) for row, indices in rows.items()} for _, rows in self.rows]

    def _blocks_load(self, indices: Sequence[int], costs: dict[tuple, int]) -> list[Load]:
        flops = sum(costs[self.layout.specs[index][1:]] for index in indices)
        return [Load(0, 0, flops)] * self.tp

    def _owners_load(self, indices: Sequence[int], costs: dict[tuple, int]) -> list[Load]:
        """Return what each rank of a row does: blocks to their owners, Newton–Schulz, blocks of the updates back."""
        specs, own, flops, back = self.layout.specs, [0] * self.tp, [0] * self.tp, [0] * self.tp
        cut = 0
        for index in indices:
            spec, owner = specs[index], self.owner_of[index].tp
            assert owner is not None, "planned matrices are whole ones"
            flops[owner] += costs[spec[1:]]
            back[owner] += spec.numel
            if spec.tp_gather_dim is not None:
                own[owner] += spec.numel
                cut += spec.numel
        calls = (1 + (cut > 0)) * (self.tp > 1)
        return [
            Load(calls, MOMENTUM_BYTES * (cut - own[t] + (self.tp - 1) * back[t]) if calls else 0, flops[t])
            for t in range(self.tp)
        ]

    @cached_property
    def bucket_groups(self) -> Counter[tuple[Load, ...]]:
        return Counter(undominated(load for row in rows.values() for load in row) for rows in self.row_loads)

    def rank_loads(self) -> list[list[float]]:
        """Return calls, bytes sent and operations of a whole step, each over ranks, a row's TP ranks together."""
        found: list[list[float]] = [[0] * (self.dp * self.tp) for _ in Load._fields]
        for rows in self.row_loads:
            for row, loads in rows.items():
                for place, load in enumerate(loads, self.tp * row):
                    for column, amount in zip(found, load, strict=True):
                        column[place] += amount
        return found

    def momentum_sent(self) -> list[np.ndarray]:
        """Return nothing: over DP, matrices are whole where they are."""
        return []

    @property
    def redundancy(self) -> tuple[float, int]:
        """Return 1, 1: nobody repeats anything."""
        return 1.0, 1

    @property
    def transient_bytes(self) -> int:
        worst = 0
        for bucket, rows in self.rows:
            sizes = PlannedRank(self.layout, self.muon).momentum_bytes(bucket)
            for own, *whole in undominated(self._held(rows)):
                worst = max(worst, owner_bound(own, WholeMatrices(*whole), sizes, COMPUTE_BYTES))
        return worst

    def _held(self, rows: dict[int, list[int]]) -> Iterator[tuple[int, ...]]:
        """Yield, of each rank, the elements in its shard and those of `WholeMatrices`."""
        specs, blocks = self.layout.specs, self.strategy == "blockwise"
        for indices in rows.values():
            own = sum(specs[index].numel for index in indices)
            theirs: dict[int, list[ParamSpec]] = {}
            for index in indices:
                theirs.setdefault(0 if blocks else self.owner_of[index].tp or 0, []).append(specs[index])
            yield from ((own, *WholeMatrices.of(each, self.tp, blocks)) for each in theirs.values())


# ---- By the name of the strategy ----

KINDS: dict[str, type[PlannedWorld]] = {
    "gather_all": PlannedWorld,
    "gather_cut": PlannedWorld,
    "owner": OwnedWorld,
    "blockwise": OwnedWorld,
}


def plan_part(
    specs: Sequence[ParamSpec], muon: Collection[int], dp: int, tp: int, bucket_size: int, strategy: str
) -> PlannedWorld:
    """Return these TP-local parameters, laid out by a strategy's own planner. muon: indices of Muon's.

    bucket_size: elements. Raises ValueError as the planner does, KeyError for a strategy that is not in KINDS.
    """
    layout = strategies.planner(strategy)(specs, muon, dp, tp, bucket_size)
    return KINDS[strategy](None, dp, tp, layout, frozenset(muon), strategy)
