"""The DP x TP grid: which rank stands where, and the two process groups it belongs to.

arange(D * T).view(D, T)         row    = one TP group: the ranks that share a replica of the model
                                 column = one DP group: the ranks that hold the same TP slice
D=4, T=2:   0 1
            2 3                  neighbours in a row have neighbouring ranks, because TP talks most and should
            4 5                  stay inside one host, on the fast links
            6 7
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distmuon.launch import World
from distmuon.sharding.collectives import Group
from distmuon.sharding.ledger import Ledger


@dataclass(frozen=True)
class Grid:
    """This rank's place. dp, tp, world: its groups, sharing one ledger. mesh: for torch's own APIs; None if alone."""

    dp: Group
    tp: Group
    world: Group
    device: torch.device
    ledger: Ledger
    mesh: DeviceMesh | None = None

    @classmethod
    def alone(cls, device: str = "cpu") -> Grid:
        """Return the 1 x 1 grid: every collective is skipped and no process group is needed."""
        return cls(Group("dp"), Group("tp"), Group("world"), torch.device(device), Ledger())

    @classmethod
    def of(cls, world: World) -> Grid:
        """Build the grid of `world`. Collective: every rank must call it. Groups get the world's timeout.

        The timeout is passed on explicitly because `new_group` does not inherit it: a mistake in a subgroup would
        otherwise hang for 30 minutes.
        """
        if world.size == 1:
            return cls.alone(world.device)
        ranks = torch.arange(world.size).view(world.dp, world.tp)
        limit = timedelta(seconds=world.timeout)
        native = world.backend == "nccl"
        ledger = Ledger()
        groups, handles = {}, []
        for name, lines in (("dp", ranks.T.tolist()), ("tp", ranks.tolist())):
            for line in lines:  # every rank creates every group, in the same order, or creation hangs
                handle = dist.new_group(line, timeout=limit, group_desc=name)
                if world.rank in line:
                    handles.append(handle)
                    groups[name] = Group(name, len(line), line.index(world.rank), handle, ledger, native)
        mesh = DeviceMesh.from_group(handles, world.device, mesh=ranks, mesh_dim_names=("dp", "tp"))
        everyone = Group("world", world.size, world.rank, dist.group.WORLD, ledger, native)
        return cls(groups["dp"], groups["tp"], everyone, _device(world), ledger, mesh)


def _device(world: World) -> torch.device:
    if world.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
