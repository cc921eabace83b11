"""What MuonW has to know before a step: who holds, who owns, and what travels in which dtype.

Groups and parameters may be others at every step: a loaded state brings new groups, a resized embedding is another
tensor. So `Plans` looks at all of them each time, keeps none of what groups say, and lays out anew where a parameter
is another one or lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.optim.exchange_plan import ExchangePlan, MatrixShard, ShardedParam
from distmuon.optim.muon_options import check_muon_parameters
from distmuon.optim.param_groups import named
from distmuon.sharding.boxes import all_of, matrices_of, within
from distmuon.sharding.collectives import Group
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.local_views import local
from distmuon.sharding.meshes import boxes_on, common_mesh, group_of
from distmuon.sharding.precision import default_gather_dtype
from distmuon.sharding.tensor_lists import runs

Groups = Sequence[Mapping[str, Any]]


class Parameter(NamedTuple):
    """One of Muon's. group: the number of its group."""

    name: str
    tensor: Tensor
    group: int


@dataclass(frozen=True)
class Plan:
    """Muon's parameters of one wave, which travel together in one dtype, and how.

    group: for plain tensors the replicas, or one rank.
    """

    dtype: torch.dtype
    device: torch.device
    group: Group
    parameters: Sequence[Parameter]
    parcels: ExchangePlan

    def here(self, piece: MatrixShard) -> tuple[slice, ...]:
        """Return where a piece lies in what this rank holds of its parameter."""
        return within(piece.box, self.parcels.parameters[piece.matrix[0]].boxes[self.group.rank])

    def inside(self, piece: MatrixShard) -> tuple[slice, ...]:
        """Return where a piece lies in its matrix."""
        return within(piece.box, self.parcels.whole(piece.matrix)[0])


class Plans:
    """The plans for the groups as they are, and the group of all ranks, on which everything is sent.

    gather_dtype, bucket_size, replicas: see `MuonW`. ledger: for what will be sent.
    """

    everybody: Group

    def __init__(
        self,
        gather_dtype: torch.dtype | None,
        bucket_size: int,
        ledger: Ledger,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._how = gather_dtype, bucket_size, ledger, replicas
        self._laid_out: list[tuple[object, ...]] | None = None  # what the plans below are for
        self._plans: list[Plan] = []

    def of(self, groups: Groups, known: Mapping[Tensor, Any]) -> list[Plan]:
        """Return the plans for Muon's parameters, wave by wave, those that travel first. known: the states so far.

        One dtype follows the other, plain tensors apart.
        Collective where the mesh has no group of all its ranks yet. Raises ValueError for a parameter that Muon cannot
        take, or whose place cannot be relied on, before anything is sent.
        """
        now = [(number, *_looks(p, group)) for number, group in enumerate(groups) for p in group["params"]]
        if now != self._laid_out:
            self.everybody, self._plans = _build_plans(groups, known, *self._how)
            self._laid_out = now
        return self._plans


def _looks(parameter: Tensor, group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return all that a plan depends on. The option is written out: a list may change in place."""
    placed = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
    option = (repr(group["matrices"]), may_move(parameter)) if group["algorithm"] == "muon" else None
    return id(parameter), parameter.shape, parameter.dtype, parameter.device, placed, option


def _build_plans(
    groups: Groups,
    known: Mapping[Tensor, Any],
    gather_dtype: torch.dtype | None,
    bucket_size: int,
    ledger: Ledger,
    replicas: dist.ProcessGroup | None,
) -> tuple[Group, list[Plan]]:
    for options in groups:
        if options["algorithm"] == "muon":
            check_muon_parameters(options, known)  # which may be others than at construction
    mesh = common_mesh([pair for group in groups for pair in named(group)])
    if mesh is not None and replicas is not None:
        raise ValueError(
            "replicas is given, and there are DTensors, whose mesh says already who holds copies; leave replicas out, "
            "and add a dimension of replicas to the mesh (HSDP)."
        )
    alone = Group("mesh", ledger=ledger)
    if replicas is not None:
        alone = Group.of_process_group("replicas", replicas, ledger)
    everybody = alone if mesh is None else group_of(mesh, ledger)
    kinds: dict[tuple[bool, torch.dtype], list[Parameter]] = {}
    for parameter in _muons(groups):
        dtype = gather_dtype or default_gather_dtype(parameter.tensor.dtype)
        kinds.setdefault((isinstance(parameter.tensor, DTensor), dtype), []).append(parameter)
    plans = []
    for (placed, dtype), parameters in kinds.items():
        group, loads = everybody if placed else alone, list[float]()
        # a wave gives every rank about a bucket to orthogonalize, if its matrices can be shared out evenly
        for wave in runs(parameters, [p.tensor.numel() for p in parameters], bucket_size * group.size):
            held = []
            for name, p, number in wave:
                if mesh is not None and isinstance(p, DTensor):
                    boxes = boxes_on(mesh, name, p)
                else:
                    boxes = [all_of(p.shape)] * group.size
                held.append(ShardedParam(boxes, matrices_of(groups[number]["matrices"], tuple(p.shape))))
            parcels = ExchangePlan(held, group.size, group.rank, loads)
            loads = parcels.loads
            plans.append(Plan(dtype, local(wave[0].tensor).device, group, wave, parcels))
    return everybody, sorted(plans, key=lambda plan: plan.group.size == 1)


def may_move(parameter: Tensor) -> bool:
    """Say whether a parameter has to be laid out: a frozen one, until it is unfrozen, travels nowhere."""
    return parameter.requires_grad or parameter.grad is not None


def _muons(groups: Groups) -> Iterator[Parameter]:
    for number, group in enumerate(groups):
        if group["algorithm"] == "muon":
            yield from (Parameter(name, p, number) for name, p in named(group) if may_move(p))
