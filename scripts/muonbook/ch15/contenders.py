"""The contenders that chapter 15 times, each without communication.

Without it, every collective returns at once, with this rank's own bytes in the others' places. What is left is the
computation of a rank, copies included, while the other ranks compute on the same cores. Its numbers mean nothing, and
stay finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from muonbook.contenders import CONTENDERS
from muonbook.measure.baselines import Trainer
from muonbook.measure.workload import Workload


@dataclass
class GroupWithoutCommunication(Group):
    """A group of `size` ranks that receive nothing from each other.

    Shapes and sums are those of Group; nothing is sent.
    """

    def all_gather(
        self,
        shard: Tensor,
        label: str,
        out: Tensor | None = None,
    ) -> Tensor:
        out = shard.new_empty(self.size * shard.numel()) if out is None else out
        for part in out.chunk(self.size):
            part.copy_(shard)
        return out

    def all_reduce(self, tensor: Tensor, label: str, op: Any = None) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, label: str) -> Tensor:
        return tensor

    def _exchange(
        self, parcels: Tensor, coming: Sequence[int] | None = None, going: Sequence[int] | None = None
    ) -> Tensor:
        if coming is None:
            return parcels
        received = parcels.new_zeros(sum(coming))
        fitting = min(len(received), len(parcels))
        received[:fitting].copy_(parcels[:fitting])
        return received

    def _record(self, op: str, payload: Tensor, label: str, sent: int | None = None) -> None:
        pass


def trainer_without_communication(name: str, workload: Workload, grid: Grid) -> Trainer:
    """Return the contender `name` on a grid of the same shape that is silent over DP; T must be 1.

    What torch's DDP adds to a step is its all-reduce: without communication, it is the bare model.
    """
    if grid.tp.size != 1:
        raise ValueError(f"T is {grid.tp.size}; only DP falls silent, so take T = 1.")
    silent = GroupWithoutCommunication("dp", grid.dp.size, grid.dp.rank)
    timed = CONTENDERS[name]
    dp = Group("dp") if timed.ddp_alone else silent
    world = GroupWithoutCommunication("world", grid.world.size, grid.world.rank)
    return timed.make(workload, Grid(dp, grid.tp, world, torch.device(grid.device), dp.ledger))
