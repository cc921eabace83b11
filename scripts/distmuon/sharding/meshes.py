"""The ranks that hold a model's DTensors: one mesh, its group, and every parameter's boxes on it.

FSDP2 over tensor parallelism leaves parameters on two meshes: [dp, tp] for what TP has cut, [dp] for the rest, which
is the same on every TP rank though DTensor does not say so. The larger mesh is everybody's; on it the others are
replicas. Experts lie on another mesh of the same ranks, [dp, ep], beside layers that are cut over all of them.
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

from distmuon.sharding.boxes import Box, all_of, box_at, boxes, extent
from distmuon.sharding.collectives import Group, backend_of
from distmuon.sharding.grid import beyond, everyone, refuse_one_stage, root_of
from distmuon.sharding.ledger import Ledger

Named = Sequence[tuple[str, Tensor]]


def common_mesh(parameters: Named) -> DeviceMesh | None:
    """Return a mesh whose ranks hold all of these DTensors; None where there are none.

    Some may lie on other meshes of the same ranks, as experts do beside dense layers, and some along a few of the
    dimensions of one. Raises ValueError, naming the parameter, for one that lies elsewhere.
    """
    meshes = [p.device_mesh for _, p in parameters if isinstance(p, DTensor)]
    if not meshes:
        return None
    widest = max(meshes, key=lambda mesh: mesh.size())
    for name, p in parameters:
        if isinstance(p, DTensor) and _frame(p.device_mesh, widest) is None:
            raise ValueError(
                f"parameter {name!r} lies on {p.device_mesh}, which is no part of {widest}, where others lie, nor of "
                "another mesh of the same ranks; make one MuonW for each mesh."
            )
    return widest


def refuse_one_of_the_stages(groups: Iterable[Mapping[str, Any]], what: str, remedy: str) -> None:
    """Raise ValueError, naming `what`, if the groups' DTensors are on one stage of a pipeline, which would decide."""
    meshes = {p.device_mesh for group in groups for p in group["params"] if isinstance(p, DTensor)}
    if meshes:
        refuse_one_stage(set.intersection(*(set(beyond(mesh)) for mesh in meshes)), what, remedy)


def refuse_without_backend(name: str, parameter: Tensor) -> None:
    """Raise ValueError, naming the parameter, for a DTensor on a device whose tensors its ranks cannot exchange."""
    if not isinstance(parameter, DTensor) or parameter.is_meta:
        return
    device, mesh = parameter.to_local().device.type, parameter.device_mesh
    if backend_of(mesh.get_group(0), device) is None:
        raise ValueError(
            f"parameter {name!r} is on the {device}, whose tensors its ranks on {mesh.device_type} cannot exchange; "
            'leave out FSDP2\'s CPUOffloadPolicy, or begin with init_process_group("cpu:gloo,cuda:nccl").'
        )


def group_of(mesh: DeviceMesh, ledger: Ledger) -> Group:
    """Return the group of all ranks of the mesh, in the order of their numbers. Collective where there is none yet."""
    ranks = sorted(ranks_of(mesh))
    handle = everyone(mesh, mesh.get_all_groups())
    return Group("mesh", len(ranks), ranks.index(mesh.get_rank()), handle, ledger)


@functools.lru_cache(maxsize=16)
def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of the flattened mesh; torch computes them anew each time, which takes long."""
    return tuple(mesh.mesh.flatten().tolist())


def boxes_on(mesh: DeviceMesh, name: str, parameter: DTensor) -> list[Box]:
    """Return the box that every rank of the mesh holds, in the order of the group.

    Raises ValueError, naming the parameter, where DTensor's word cannot be relied on.
    """
    own_box(name, parameter)  # which looks whether it really lies there
    own, frame = parameter.device_mesh, _frame(parameter.device_mesh, mesh)
    assert frame is not None
    held = boxes(tuple(parameter.shape), tuple(own.shape), parameter.placements)
    box_of = dict(zip(itertools.product(*map(range, own.shape)), held, strict=True))
    dims = [_dimensions(frame).index(dim) for dim in _dimensions(own)]
    coordinates = itertools.product(*map(range, frame.shape))
    at_rank = {
        rank: box_of[tuple(at[dim] for dim in dims)] for rank, at in zip(ranks_of(frame), coordinates, strict=True)
    }
    return [at_rank[rank] for rank in sorted(at_rank)]


def shards(parameter: Tensor) -> int:
    """Return into how many parts a parameter is cut; what the ranks hold beyond so many are copies."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def own_box(name: str, parameter: Tensor) -> Box:
    """Return the box that this rank holds; of a plain tensor, all of it. Errors as for `boxes_on`."""
    if not isinstance(parameter, DTensor):
        return all_of(parameter.shape)
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
    frame: DeviceMesh | None = mesh
    cut = set[str | int]()
    if isinstance(parameter, DTensor):
        frame, names = _frame(parameter.device_mesh, mesh), _dimensions(parameter.device_mesh)
        cut = {name for name, place in zip(names, parameter.placements, strict=True) if not place.is_replicate()}
    assert frame is not None
    coordinate = frame.get_coordinate()
    assert coordinate is not None
    return all(at == 0 for name, at in zip(_dimensions(frame), coordinate, strict=True) if name not in cut)


def _frame(own: DeviceMesh, everybody: DeviceMesh) -> DeviceMesh | None:
    """Return a mesh of everybody's ranks that `own` is, or is a part of along some dimensions; None for none.

    Along the other dimensions of that mesh, what lies on `own` is the same, though DTensor does not say so.
    """
    for mesh in (everybody, own, root_of(own)):
        if mesh is not None and set(ranks_of(mesh)) == set(ranks_of(everybody)):
            named = own.mesh_dim_names is not None and set(own.mesh_dim_names) <= set(mesh.mesh_dim_names or ())
            if own == mesh or (named and set(ranks_of(own)) <= set(ranks_of(mesh))):
                return mesh
    return None


def _dimensions(mesh: DeviceMesh) -> Sequence[str | int]:
    """Return the mesh's dimensions by name, or by number where they have none."""
    return mesh.mesh_dim_names or range(mesh.ndim)
