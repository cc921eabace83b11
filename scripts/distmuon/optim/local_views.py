"""The local views of an optimizer that updates parameters where PyTorch has placed them, as tensors or DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from distmuon.optim.masters import MasterWeights
from distmuon.optim.states import MASTER_WEIGHT
from distmuon.sharding.boxes import matrices_of
from distmuon.sharding.local_views import LocalView, local
from distmuon.sharding.meshes import common_mesh, is_first_replica

Feeds = Callable[[dict[str, Any], Tensor], torch.dtype | None]


def local_views(optimizer: torch.optim.Optimizer) -> Iterable[LocalView]:
    """Return what this rank holds of an optimizer's parameters: as its own method says, or where they are."""
    own = getattr(optimizer, "local_views", None)
    return views_in_place(optimizer) if own is None else own()


def views_in_place(optimizer: torch.optim.Optimizer, feeds: Feeds | None = None) -> list[LocalView]:
    """Return what this rank holds; no collective.

    feeds(group, parameter): in which dtype Newton–Schulz sees the parameter's matrices; None: it does not see them.
    Raises ValueError, naming the parameter, for a DTensor on other ranks than the others.
    """
    members = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group{number}.{i}" for i, _ in enumerate(group["params"])]
        members += [(group, name, p) for name, p in zip(names, group["params"], strict=True)]
    mesh = common_mesh([(name, p) for _, name, p in members])
    found = []
    for group, name, p in members:
        ns_dtype = None if feeds is None else feeds(group, p)
        view = LocalView.in_place(
            name,
            p,
            values=_values(optimizer, p),
            dtype=optimizer.kept_dtype(p) if isinstance(optimizer, MasterWeights) else p.dtype,
            counted=mesh is None or is_first_replica(p, mesh),
            matrices=() if ns_dtype is None else matrices_of(group["matrices"], tuple(p.shape)),
            ns_dtype=ns_dtype,
        )
        found.append(view)
    return found


def _values(optimizer: torch.optim.Optimizer, p: Tensor) -> Tensor:
    """Return the parameter's local tensor, or its master weights, once there are some, as they are now."""
    if isinstance(optimizer, MasterWeights) and MASTER_WEIGHT in optimizer.state.get(p, {}):
        master = optimizer.master(p)
        assert master is not None
        return master
    return local(p.detach())
