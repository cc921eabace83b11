"""What a rank holds of every parameter, seen alike for flat shards, DTensors and plain tensors.

    flat runs of TP-local parameters    Zero1AdamW, DistributedMuon       replicated over TP: TP rank 0 counts
    boxes of whole parameters           MuonW, torch's AdamW and Muon     replicas: the first rank of the mesh counts
    whole parameters                    all of these, and Muon            every rank for itself

Elements that several ranks hold are counted by one of them, so that sums over all ranks are sums over the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.extras.checkpoint.boxed import boxes_of_flat_range
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.masters import MasterWeights
from distmuon.optim.muon import Muon
from distmuon.optim.muonw import MuonW
from distmuon.optim.muonw_plans import local
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.strategies.strategy import gather_dtype_name
from distmuon.sharding.boxes import Box, all_of, matrices_of
from distmuon.sharding.buffers import Piece, dtype_name
from distmuon.sharding.collectives import Group
from distmuon.sharding.layout import gradient_dtype
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.matrices import globalize
from distmuon.sharding.meshes import boxes_on, common_mesh, group_of

MOMENTA = ("momentum_buffer", "exp_avg")  # under which optimizers keep it
WATCHED = (ShardedOptimizer, MuonW, Muon, torch.optim.Muon, torch.optim.AdamW)


class Whole(NamedTuple):
    """A whole parameter. group: its number. dtype: of its master weights, or its own.

    matrices: those that Newton–Schulz takes, (box, [A, B]) each.
    """

    name: str
    group: int
    numel: int
    dtype: torch.dtype
    matrices: Sequence[tuple[Box, tuple[int, int]]]


@dataclass(frozen=True)
class HeldPart:
    """This rank's part of a parameter: n elements, flat or a box, in memory that the optimizer writes to.

    index: the parameter's number. counted: whether this rank counts them.
    fed_dtype: in which Newton–Schulz sees their momentum.
    """

    index: int
    parameter: Tensor
    weight: Tensor
    counted: bool
    fed_dtype: torch.dtype


class OnShards:
    """The holdings of a sharded optimizer."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer, self.buffers, grid = optimizer, optimizer.buffers, optimizer.grid
        self.wires, self.device = replace(grid.world, ledger=Ledger()), grid.device
        self.first_of_tp = grid.tp.rank == 0
        self._pieces = {piece.index: piece for pieces in self.buffers.pieces.values() for piece in pieces}
        number = {id(group): number for number, group in enumerate(optimizer.param_groups)}
        self.wholes = []
        for index, spec in enumerate(self.buffers.layout.specs):
            group, shape = optimizer.group_of[index], spec.full_shape(grid.tp.size)
            matrices = globalize(spec.matrices, spec.tp_split_dim, grid.tp.size)
            found = matrices_of(matrices, shape) if group["algorithm"] == "muon" else []
            dtype = getattr(torch, gradient_dtype(spec.dtype))
            self.wholes.append(Whole(spec.name, number[id(group)], math.prod(shape), dtype, found))

    @property
    def sent_bytes(self) -> int:
        return self.optimizer.grid.ledger.total().sent_bytes

    def parts(self) -> list[HeldPart]:
        """Return what this rank holds; masters that are about to follow what somebody wrote, follow now."""
        self.buffers.refresh_masters()
        return [self._part(piece) for piece in self._pieces.values()]

    def gradient(self, part: HeldPart) -> Tensor | None:
        """Return the gradient of the latest step as it was used, as `part.weight`; None where there was none."""
        present = part.index in self.optimizer.statistics.present
        return self._pieces[part.index].gradient if present else None

    def squared_gradients(self, summed: Tensor) -> Tensor:  # [P]
        """Return the squared norms of the latest step's gradients, from before clipping."""
        return self.optimizer.statistics.squared_norms

    def boxes(self, part: HeldPart, values: Tensor) -> list[tuple[Box, Tensor]]:
        """Return values that belong to `part.weight` as boxes of the whole parameter."""
        tp, spec = self.optimizer.grid.tp, self.buffers.layout.specs[part.index]
        return boxes_of_flat_range(spec, tp.size, tp.rank, self._pieces[part.index].meta.range_in_param, values)

    def _part(self, piece: Piece) -> HeldPart:
        p, fed = self.buffers.parameters[piece.index], piece.gradient.dtype
        if isinstance(self.optimizer, DistributedMuon):
            bucket = next(bucket for bucket in self.buffers.buckets if piece.index in bucket.params)
            fed = self.optimizer.strategy.context.wire_dtype((bucket,))
        counted = piece.meta.tp_split_dim is not None or self.first_of_tp
        return HeldPart(piece.index, p, piece.weight, counted, fed)


class InPlace:
    """The holdings of an optimizer that takes tensors where they are, DTensors among them or not."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        groups = list(enumerate(optimizer.param_groups))
        names = [
            group.get("param_names") or [f"group{n}.{i}" for i in range(len(group["params"]))] for n, group in groups
        ]
        self.parameters = [p for _, group in groups for p in group["params"]]
        named = list(zip([name for some in names for name in some], self.parameters, strict=True))
        mesh = common_mesh(named)
        self.wires = Group("mesh") if mesh is None else group_of(mesh, Ledger())
        self.device = local(self.parameters[0]).device if self.parameters else torch.device("cpu")
        self.first_of_tp = True
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            self.first_of_tp = mesh.get_local_rank("tp") == 0
        self.wholes, self._boxes, self._counted = [], list[Box](), list[bool]()
        numbers = [number for number, group in groups for _ in group["params"]]
        for (name, p), number in zip(named, numbers, strict=True):
            boxes = [all_of(p.shape)] * self.wires.size
            if mesh is not None and isinstance(p, DTensor):
                boxes = boxes_on(mesh, name, p)
            self._boxes.append(boxes[self.wires.rank])
            self._counted.append(boxes.index(boxes[self.wires.rank]) == self.wires.rank)
            dtype = optimizer.kept_dtype(p) if isinstance(optimizer, MasterWeights) else p.dtype
            self.wholes.append(Whole(name, number, p.numel(), dtype, self._matrices(p, number)))

    @property
    def sent_bytes(self) -> int:
        return self.optimizer.ledger.total().sent_bytes if isinstance(self.optimizer, MuonW) else 0

    def parts(self) -> list[HeldPart]:
        """Return what this rank holds."""
        return [
            HeldPart(index, p, self._weight(p), self._counted[index], self._fed_dtype(index))
            for index, p in enumerate(self.parameters)
        ]

    def gradient(self, part: HeldPart) -> Tensor | None:
        """Return the gradient that the latest step has used, as `part.weight`; None where there was none."""
        gradient = part.parameter.grad
        return None if gradient is None else local(gradient)

    def squared_gradients(self, summed: Tensor) -> Tensor:  # [P]
        """Return the squared norms of the latest step's gradients, from the sums over all ranks."""
        return summed

    def boxes(self, part: HeldPart, values: Tensor) -> list[tuple[Box, Tensor]]:
        """Return values that belong to `part.weight` as boxes of the whole parameter."""
        return [(self._boxes[part.index], values)]

    def _weight(self, p: Tensor) -> Tensor:
        master = self.optimizer.master(p) if isinstance(self.optimizer, MasterWeights) else None
        return local(p.detach()) if master is None else master

    def _matrices(self, p: Tensor, number: int) -> Sequence[tuple[Box, tuple[int, int]]]:
        group = self.optimizer.param_groups[number]
        muon = isinstance(self.optimizer, Muon) or group.get("algorithm") == "muon"
        return matrices_of(group["matrices"], tuple(p.shape)) if muon else []

    def _fed_dtype(self, index: int) -> torch.dtype:
        p, group = self.parameters[index], self.optimizer.param_groups[self.wholes[index].group]
        if isinstance(self.optimizer, MuonW):
            return self.optimizer.gather_dtype or getattr(torch, gather_dtype_name(dtype_name(p.dtype)))
        return group.get("input_dtype") or p.dtype


Holdings = OnShards | InPlace


def momentum_of(optimizer: torch.optim.Optimizer, part: HeldPart) -> Tensor | None:  # as `part.weight`
    """Return what the optimizer's state has of this part's momentum; None before its first step."""
    state = optimizer.state.get(part.parameter, {})
    return next((local(state[name]) for name in MOMENTA if name in state), None)


def holdings(optimizer: Any) -> Holdings:
    """Return what this rank holds of the optimizer's parameters. Collective where its mesh has no group of all ranks.

    Raises TypeError for an optimizer whose step is not decay and an update times the learning rate, as far as we know.
    """
    if not isinstance(optimizer, WATCHED):
        raise TypeError(
            f"Metrics cannot watch a {type(optimizer).__name__}, whose decay and learning rate it does not know; it "
            "takes Muon, MuonW, DistributedMuon, Zero1AdamW, and torch's Muon and AdamW."
        )
    return OnShards(optimizer) if isinstance(optimizer, ShardedOptimizer) else InPlace(optimizer)
