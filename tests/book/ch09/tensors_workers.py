"""What the ranks of a group report of real collectives: values before and after, and where they came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from muonbook.provenance import with_sources


def collectives(world: World) -> dict[str, Any]:
    """Return {name: (before, values, sources)} of this rank, for each collective of the group."""
    group = Grid.of(world).world
    mine = 10.0 * (world.rank + 1) + torch.arange(2 * world.size)
    cases: dict[str, tuple[Tensor, Callable[[Tensor], Tensor | None]]] = {
        "all_gather": (mine[:2], lambda x: group.all_gather(x, "shown")),
        "all_reduce": (mine, lambda x: group.all_reduce(x, "shown")),
        "reduce_scatter": (mine, lambda x: group.reduce_scatter(x, torch.empty(2), "shown")),
        "broadcast": (mine, lambda x: group.broadcast(x, "shown")),
        "rows": (mine[:4].view(2, 2), lambda x: group.all_gather_blocks(x, 0, "shown")),
        "columns": (mine[:4].view(2, 2), lambda x: group.all_gather_blocks(x, 1, "shown")),
        "on rank 0 alone": (mine, lambda x: group.all_reduce(x, "shown") if world.rank == 0 else _nothing(group, x)),
    }
    return {
        name: (tensor.tolist(), *with_sources(collective, tensor, world.rank, world.size))
        for name, (tensor, collective) in cases.items()
    }


def _nothing(group: Any, tensor: Tensor) -> None:
    group.all_reduce(tensor, "shown")
