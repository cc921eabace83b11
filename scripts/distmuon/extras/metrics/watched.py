"""Whom metrics watch: the local views of an optimizer, and the ranks over which sums of them are sums over the model.

DTensors                            all ranks of their mesh
an optimizer with a grid            all ranks of the grid
others that keep parts alone        all ranks there are
whole parameters                    every rank for itself
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.optim.masters import local_views
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.local_views import LocalView, local
from distmuon.sharding.meshes import common_mesh, group_of

MOMENTA = ("momentum_buffer", "exp_avg")  # under which optimizers keep it
PLACED_BY_TORCH = (torch.optim.Muon, torch.optim.AdamW)


class WatchedOptimizer:
    """An optimizer, its views, and `world`: the ranks that hold the rest. Collective where these have no group yet.

    Raises TypeError for an optimizer whose step is not decay and an update times the learning rate, as far as we know;
    ValueError where its views leave out a parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not hasattr(optimizer, "local_views") and not isinstance(optimizer, PLACED_BY_TORCH):
            raise TypeError(
                f"Metrics cannot watch a {type(optimizer).__name__}, whose decay and learning rate it does not know; "
                "it takes Muon, MuonW, DistributedMuon, Zero1AdamW, torch's Muon and AdamW, and optimizers of your own "
                "that have the method local_views() and move weights by lr times an update, decay apart."
            )
        self.optimizer = optimizer
        self.group_of = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        views = self.views()
        self.names = [view.name for view in views]
        self.world, self.device, self.first_of_tp = _ranks_of(optimizer, views)

    def views(self) -> list[LocalView]:
        """Return the views of this moment, in the order of the groups."""
        found = {id(view.parameter): view for view in local_views(self.optimizer)}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for p in parameters:
            if id(p) not in found:
                raise ValueError(
                    f"local_views() of {type(self.optimizer).__name__} leaves out a parameter of shape "
                    f"{list(p.shape)}; let it return a view of each, with values=None where this rank keeps nothing."
                )
        return [found[id(p)] for p in parameters]

    def momentum_of(self, view: LocalView) -> Tensor | None:  # as `view.values`
        """Return what the state has of a parameter's momentum; None before its first step."""
        state = self.optimizer.state.get(view.parameter, {})
        return next((local(state[name]) for name in MOMENTA if name in state), None)

    def squared_gradients(self, summed: Tensor) -> Tensor:  # [P]
        """Return the squared norms of the latest step's gradients: from before clipping, where the optimizer clips."""
        statistics = getattr(self.optimizer, "statistics", None)
        return summed if statistics is None else statistics.squared_norms

    @property
    def sent_bytes(self) -> int:
        """What the optimizer's ledger says has been sent; 0 for one that keeps none."""
        ledger = getattr(getattr(self.optimizer, "grid", self.optimizer), "ledger", None)
        return ledger.total().sent_bytes if isinstance(ledger, Ledger) else 0


def _ranks_of(optimizer: torch.optim.Optimizer, views: list[LocalView]) -> tuple[Group, torch.device, bool]:
    """Return whose sums are added up, where, and whether this rank is the first of its TP group."""
    grid = getattr(optimizer, "grid", None)
    if isinstance(grid, Grid):
        return replace(grid.world, ledger=Ledger()), grid.device, grid.tp.rank == 0
    device = next((view.values.device for view in views if view.values is not None), torch.device("cpu"))
    if mesh := common_mesh([(view.name, view.parameter) for view in views]):
        first = "tp" not in (mesh.mesh_dim_names or ()) or mesh.get_local_rank("tp") == 0
        return group_of(mesh, Ledger()), device, first
    everybody = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if everybody is not None and any(not view.is_whole for view in views):
        return Grid.of(everybody).world, device, True
    return Group("mesh"), device, True
