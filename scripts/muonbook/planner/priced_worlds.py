"""Planned worlds of any strategy, by what its own file says in COSTS, which is asked about every rank.

`planned_worlds` and `owned_worlds` say the same of three strategies in arrays over ranks, in the time that one rank
takes here; tests hold them equal. A row of the ledger belongs to the bucket with which its label ends, or to that of
the parameter: "momentum, <name>". Where it names neither, the whole step waits for it once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distmuon.optim import strategies
from distmuon.optim.newton_schulz import flops
from distmuon.optim.strategies.costs import PlannedRank, StrategyCosts, Task
from distmuon.sharding.ledger import Ledger
from muonbook.planner.cost_model import hops
from muonbook.planner.planned_worlds import COMPUTE_BYTES, Load, PlannedWorld, undominated

HOPS, SENT = range(2)  # what is kept of moves over DP


@dataclass(frozen=True)
class PricedWorld(PlannedWorld):
    """A planned world whose strategy's COSTS are asked, about all D x T ranks. Of steps that are not all alike, bytes
    and work are a period's mean.

    Raises ValueError for COSTS that are missing, have no `tasks`, send among all ranks at once, or name a parameter or
    a rank that is not there.
    """

    @cached_property
    def costs(self) -> list[tuple[float, StrategyCosts]]:
        """(share of all steps, costs) of every kind of step."""
        first = strategies.priced(self.strategy)
        period = 1 + sum(number for number, _ in first.others)
        return [(number / period if period > 1 else 1, each) for number, each in ((1, first), *first.others)]

    @cached_property
    def ranks(self) -> list[PlannedRank]:
        """All ranks, those of a row one after the other."""
        return [
            PlannedRank(self.layout, self.muon, self.tp, rank // self.tp, rank % self.tp, compute_bytes=COMPUTE_BYTES)
            for rank in range(self.dp * self.tp)
        ]

    @cached_property
    def places(self) -> dict[str, int]:
        """What labels end with -> which bucket that is."""
        found = {bucket.label: place for place, bucket in enumerate(self.layout.buckets)}
        for place, bucket in enumerate(self.layout.buckets):
            found |= {self.layout.specs[index].name: place for index in bucket.params}
        return found

    @cached_property
    def moves(self) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """(share, `Load`s [buckets + 1, 3, D x T], moves over DP [buckets + 1, 2, D x T]) of every kind of step.

        The last of the buckets is whatever names none.
        """
        return [(share, *self._moves(costs)) for share, costs in self.costs]

    def _moves(self, costs: StrategyCosts) -> tuple[np.ndarray, np.ndarray]:
        buckets, ranks = len(self.layout.buckets) + 1, self.dp * self.tp
        loads, outer = np.zeros((buckets, len(Load._fields), ranks), np.int64), np.zeros((buckets, 2, ranks), np.int64)
        for rank, at in enumerate(self.ranks):
            costs.sends(ledger := Ledger(), at)
            for entry, traffic in ledger:
                if entry.group not in ("dp", "tp"):
                    raise ValueError(
                        f"strategy is {self.strategy!r}, which sends in the group {entry.group!r}; only moves over "
                        "'dp' and 'tp' can be planned."
                    )
                place = self.places.get(entry.label.partition(", ")[2], -1)
                if entry.group == "dp":
                    outer[place, :, rank] += traffic.calls * hops(entry.op, self.dp), traffic.sent_bytes
                else:
                    calls = traffic.calls * hops(entry.op, self.tp) // (self.tp - 1)
                    loads[place, :2, rank] += calls, traffic.sent_bytes
        assert costs.tasks is not None, "`priced` refuses it"
        for task in costs.tasks(self.layout, self.muon, self.tp):
            self._check(task)
            place = self.places[self.layout.specs[task.parameter].name]
            loads[place, 2, [d * self.tp + t for d, t in task.ranks]] += task.flops
        return loads, outer

    def _check(self, task: Task) -> None:
        if task.parameter not in self.muon:
            raise ValueError(
                f"strategy is {self.strategy!r}, whose `tasks` name parameter {task.parameter}, which is none of "
                "Muon's; give indices of `muon`."
            )
        for d, t in task.ranks:
            if not (0 <= d < self.dp and 0 <= t < self.tp):
                raise ValueError(
                    f"strategy is {self.strategy!r}, whose `tasks` name the rank (dp {d}, tp {t}) of a grid of "
                    f"{self.dp} x {self.tp}; ranks count from 0."
                )

    @property
    def has_owners(self) -> bool:
        found = Ledger()
        for _, costs in self.costs:
            costs.sends(found, self.ranks[0])
        return any((entry.op, entry.group) == ("all_to_all", "tp") for entry, _ in found)

    @cached_property
    def loads(self) -> list[np.ndarray]:
        """As `PlannedWorld.loads`, [3, D x T], of every bucket that has any; a period's mean."""
        mean = np.sum([share * loads for share, loads, _ in self.moves], axis=0)
        return [each for each in mean if each.any()]

    @cached_property
    def bucket_groups(self) -> Mapping[tuple[Load, ...], float]:
        found = Counter[tuple[Load, ...]]()
        for share, loads, _ in self.moves:
            for columns in (each for each in loads if each.any()):
                found[tuple(map(Load._make, undominated(columns)))] += share  # type: ignore[assignment]
        return found

    def momentum_sent(self) -> list[np.ndarray]:
        """As `PlannedWorld.momentum_sent`, [D x T]: of every bucket, and of every kind of step its share."""
        return [share * each[SENT] for share, _, outer in self.moves for each in outer if each.any()]

    def momentum_hops(self) -> float:
        return sum(share * each[HOPS].max().item() for share, _, outer in self.moves for each in outer)

    @property
    def redundancy(self) -> float:
        """Operations of all ranks over those of every whole matrix once; below 1 where blocks are taken."""
        whole = sum(flops(self.layout.specs[index].full_shape(self.tp)) for index in self.muon)
        return float(self.rank_loads()[2].sum()) / whole

    @property
    def transient_bytes(self) -> int:
        return max(costs.allocates(at) for _, costs in self.costs for at in self.ranks)
