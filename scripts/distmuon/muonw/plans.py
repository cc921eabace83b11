"""What MuonW decides once, before its first step: who holds, who owns, and what travels in which dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.muonw.boxes import all_of, matrices_of, within
from distmuon.muonw.meshes import boxes_on, common_mesh, group_of
from distmuon.muonw.parcels import MatrixPiece, Parcels, Placed
from distmuon.optim.routing import named
from distmuon.sharding.collectives import Group
from distmuon.sharding.ledger import Ledger


class Parameter(NamedTuple):
    """One of Muon's, and its group."""

    name: str
    tensor: Tensor
    group: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Muon's parameters that travel in one dtype, and how. group: of one rank, for plain tensors."""

    dtype: torch.dtype
    device: torch.device
    group: Group
    parameters: Sequence[Parameter]
    parcels: Parcels

    def here(self, piece: MatrixPiece) -> tuple[slice, ...]:
        """Return where a piece lies in what this rank holds of its parameter."""
        return within(piece.box, self.parcels.parameters[piece.matrix[0]].boxes[self.group.rank])

    def inside(self, piece: MatrixPiece) -> tuple[slice, ...]:
        """Return where a piece lies in its matrix."""
        return within(piece.box, self.parcels.whole(piece.matrix)[0])


def lay_out(
    groups: Sequence[Mapping[str, Any]], gather_dtype: torch.dtype | None, ledger: Ledger
) -> tuple[Group, list[Plan]]:
    """Return the group of all ranks, and the plans for Muon's parameters: one for each dtype, plain tensors apart.

    gather_dtype: see `MuonW`. ledger: for what will be sent. Collective where the mesh has no group of all its ranks.
    Raises ValueError for a parameter whose place cannot be relied on, before anything is sent.
    """
    mesh = common_mesh([pair for group in groups for pair in named(group)])
    alone = Group("mesh", ledger=ledger)
    everybody = alone if mesh is None else group_of(mesh, ledger)
    kinds: dict[tuple[bool, torch.dtype], list[Parameter]] = {}
    for parameter in _muons(groups):
        natural = torch.float64 if parameter.tensor.dtype == torch.float64 else torch.bfloat16
        kinds.setdefault((isinstance(parameter.tensor, DTensor), gather_dtype or natural), []).append(parameter)
    plans = []
    for (placed, dtype), parameters in kinds.items():
        group = everybody if placed else alone
        held = []
        for name, p, options in parameters:
            boxes = [all_of(p.shape)] if mesh is None or not isinstance(p, DTensor) else boxes_on(mesh, name, p)
            held.append(Placed(boxes, matrices_of(options["matrices"], tuple(p.shape))))
        parcels = Parcels(held, group.size, group.rank)
        plans.append(Plan(dtype, local(parameters[0].tensor).device, group, parameters, parcels))
    return everybody, plans


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in the same memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _muons(groups: Sequence[Mapping[str, Any]]) -> Iterator[Parameter]:
    for group in groups:
        if group["algorithm"] == "muon":
            yield from (Parameter(name, p, group) for name, p in named(group))  # type: ignore[arg-type]
