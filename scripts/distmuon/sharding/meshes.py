"""The ranks that hold a model's DTensors: one mesh, its group, and every parameter's boxes on it.

FSDP2 over tensor parallelism leaves parameters on two meshes: [dp, tp] for what TP has cut, [dp] for the rest, which
is the same on every TP rank though DTensor does not say so. The larger mesh is everybody's; on it the others are
replicas.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distmuon.sharding.boxes import Box, box_at, boxes, extent
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import beyond, everyone, refuse_one_stage
from distmuon.sharding.ledger import Ledger

Named = Sequence[tuple[str, Tensor]]


def common_mesh(parameters: Named) -> DeviceMesh | None:
    """Return the mesh on which all of these DTensors lie, some of them along a few of its dimensions; None for none.

    Raises ValueError, naming the parameter, for one that lies elsewhere.
    """
    meshes = [p.device_mesh for _, p in parameters if isinstance(p, DTensor)]
    if not meshes:
        return None
    widest = max(meshes, key=lambda mesh: mesh.size())
    names = widest.mesh_dim_names or ()
    for name, p in parameters:
        if isinstance(p, DTensor) and p.device_mesh != widest:
            own = p.device_mesh
            inside = set(ranks_of(own)) <= set(ranks_of(widest))
            if not inside or own.mesh_dim_names is None or not set(own.mesh_dim_names) <= set(names):
                raise ValueError(
                    f"parameter {name!r} lies on {own}, which is no part of {widest}, where others lie; make one MuonW "
                    "for each mesh."
                )
    return widest


def refuse_one_of_the_stages(groups: Iterable[Mapping[str, Any]], what: str, remedy: str) -> None:
    """Raise ValueError, naming `what`, if the groups' DTensors are on one stage of a pipeline, which would decide."""
    meshes = {p.device_mesh for group in groups for p in group["params"] if isinstance(p, DTensor)}
    if meshes:
        refuse_one_stage(set.intersection(*(set(beyond(mesh)) for mesh in meshes)), what, remedy)


def group_of(mesh: DeviceMesh, ledger: Ledger) -> Group:
    """Return the group of all ranks of the mesh, in the order of their numbers. Collective where there is none yet."""
    ranks = sorted(ranks_of(mesh))
    handle = everyone(mesh, mesh.get_all_groups())
    return Group("mesh", len(ranks), ranks.index(mesh.get_rank()), handle, ledger)


@functools.lru_cache(maxsize=16)
def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of the flattened mesh; torch computes them anew each time, which takes long."""
    return tuple(mesh.mesh.flatten().tolist())


def boxes_on(
    mesh: DeviceMesh,
    name: str,
    parameter: DTensor,
) -> list[Box]:
    """Return the box that every rank of the mesh holds, in the order of the group.

    Raises ValueError, naming the parameter, where DTensor's word cannot be relied on.
    """
    own_box(name, parameter)  # which looks whether it really lies there
    own = parameter.device_mesh
    found = boxes(tuple(parameter.shape), tuple(own.shape), parameter.placements)
    if own == mesh:
        on_mesh = found
    else:
        assert mesh.mesh_dim_names is not None
        assert own.mesh_dim_names is not None
        dims = [mesh.mesh_dim_names.index(dim) for dim in own.mesh_dim_names]
        coordinates = itertools.product(*map(range, mesh.shape))
        on_mesh = [found[_flat([at[dim] for dim in dims], tuple(own.shape))] for at in coordinates]
    order = ranks_of(mesh)
    return [on_mesh[order.index(rank)] for rank in sorted(order)]


def shards(parameter: Tensor) -> int:
    """Return into how many parts a parameter is cut; what the ranks hold beyond so many are copies."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def own_box(name: str, parameter: DTensor) -> Box:
    """Return the box that this rank holds; errors as for `boxes_on`."""
    own, placements = parameter.device_mesh, parameter.placements
    coordinate = own.get_coordinate()
    assert coordinate is not None
    box = box_at(tuple(parameter.shape), tuple(own.shape), placements, coordinate)
    held, here = extent(box), tuple(parameter.to_local().shape)
    if held != here and math.prod(held) + math.prod(here):  # torch calls what is empty [2, 0] or [0, 0]
        raise ValueError(
            f"parameter {name!r} holds {here} here, and its placements {placements} on "
            f"{own} say {held}; wrap the model anew, or give this parameter to another optimizer."
        )
    return box


def is_first_replica(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Say whether this rank is the first on the mesh that holds what it holds of a parameter, so that one is counted.

    A plain tensor is the same on all of the mesh, a DTensor along the dimensions that it is not cut along.
    """
    cut = set[str | int]()
    if isinstance(parameter, DTensor):
        names = _dimensions(parameter.device_mesh)
        cut = {name for name, place in zip(names, parameter.placements, strict=True) if not place.is_replicate()}
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return all(at == 0 for name, at in zip(_dimensions(mesh), coordinate, strict=True) if name not in cut)


def _dimensions(mesh: DeviceMesh) -> Sequence[str | int]:
    """Return the mesh's dimensions by name, or by number where they have none."""
    return mesh.mesh_dim_names or range(mesh.ndim)


def _flat(coordinate: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(at * math.prod(sizes[dim + 1 :]) for dim, at in enumerate(coordinate))
