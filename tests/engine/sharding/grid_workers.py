"""Grids of a program that knows nothing of our launcher: of process groups, meshes and their parts; and no grids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import optimizer_cases as cases
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import mark

RANKS, TIMEOUT = 8, 400.0
TRAINED = ("tp first", "scattered part", "groups")
CASE = replace(cases.SMALL, steps=2)


def forms() -> dict[str, Callable[[], Any]]:
    """What `Grid.of` takes: name -> how to make it, on every rank."""

    def pipeline() -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]

    def odd_pipeline() -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))["dp", "tp"]

    def groups() -> Grid:
        named = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "model"))
        return Grid.of_groups(dp=named.get_group("replicas"), tp=named.get_group("model"))

    return {
        "mesh": lambda: init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")),
        "tp first": lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp", "dp")),
        "dp alone": lambda: DeviceMesh("cpu", list(range(RANKS)), mesh_dim_names=("dp",)),
        "tp alone": lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "tp"))["tp"],
        "part of a mesh": pipeline,
        "scattered part": odd_pipeline,
        "groups": groups,
        "one group": lambda: dist.group.WORLD,
    }


def wrong() -> dict[str, Callable[[], Any]]:
    """What `Grid.of` refuses."""
    named = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "model"))
    pipeline = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "tp"))
    half, rows = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",)), named.get_group("model")
    few = dist.new_group([0, 1])
    return {
        "other names": lambda: named,
        "one more dimension": lambda: pipeline,
        "no names": lambda: DeviceMesh("cpu", list(range(RANKS))),
        "descending": lambda: DeviceMesh("cpu", [[1, 0], [3, 2], [5, 4], [7, 6]], mesh_dim_names=("dp", "tp")),
        "rank outside the mesh": lambda: half,
        "rank outside the group": lambda: few,
        "one group twice": lambda: Grid.of_groups(dp=rows, tp=rows),
        "no group": Grid.of_groups,
        "a number": lambda: 8,
        "nothing": lambda: None,
    }


def place(grid: Grid) -> dict[str, Any]:
    """Return where this rank stands, and what its groups really add up."""
    found: dict[str, Any] = {"device": grid.device, "one ledger": grid.dp.ledger is grid.tp.ledger is grid.world.ledger}
    for name in ("dp", "tp", "world"):
        group = getattr(grid, name)
        numbers = torch.zeros(RANKS, dtype=torch.int64)
        numbers[dist.get_rank()] = 1
        members = group.all_reduce(numbers, "who is here").nonzero().flatten().tolist()  # in their group in this order
        found[name] = (group.size, group.rank, members)
    backend = None if grid.world.size == 1 else grid.world.process_group._get_backend(torch.device("cpu"))
    return found | {"timeout": backend and backend.options._timeout}


def facts(world: World) -> dict[str, Any]:
    """Make and use a grid of every form, and be refused. Nothing of `world` is used: this is a program of its own."""
    found: dict[str, Any] = {"places": {}, "refusals": {}, "trained": {}, "wanted": {}}
    for name, make in forms().items():
        grid = DistributedMuon([mark(nn.Parameter(torch.ones(4, 4)), None)], make()).grid  # takes what Grid.of takes
        found["places"][name] = place(grid)
        if name in TRAINED:
            found["trained"][name] = cases.train_sharded(CASE, grid).values
            found["wanted"][name] = cases.train_alone(world, CASE, grid.dp.size, grid.tp.size).values
    for name, make in wrong().items():
        try:
            Grid.of(make())
            found["refusals"][name] = None
        except (TypeError, ValueError) as error:
            found["refusals"][name] = f"{type(error).__name__}: {error}"
    dist.barrier()  # some ranks were not refused
    return found


def in_rank_order(world: World) -> dict[str, Any]:
    """Sum numbers whose sum depends on the order, with the backend's reduce-scatter and in rank order."""
    grid = Grid.of(world)
    native = replace(grid, dp=replace(grid.dp, native_reduce_scatter=True))
    ordered = native.in_rank_order()
    number = torch.tensor([1e8, 1.0, -1e8, 1.0][grid.dp.rank])
    full = number.repeat(2 * grid.dp.size)
    grid.ledger.clear()
    total = ordered.dp.reduce_scatter(full, torch.empty(2), "x")
    return {
        "total": total.tolist(),
        "same ledger": ordered.ledger is grid.ledger and len(list(grid.ledger)) == 1,
        "same groups": [getattr(ordered, n).process_group is getattr(grid, n).process_group for n in ("dp", "world")],
        "native": [native.dp.native_reduce_scatter, ordered.dp.native_reduce_scatter],
    }


def timeout() -> timedelta:
    return timedelta(seconds=TIMEOUT)
