"""What MuonW decides before a step: who holds what, who orthogonalizes which matrix, and what travels for it.

    pieces of the momentum   ->  the owner of each matrix      all-to-all
    pieces of the update     ->  everybody who holds them      all-to-all

A matrix has one owner in the whole mesh, replicas included; the costliest are dealt out first, each to whoever has
least. What a rank alone holds whole it owns: experts that FSDP2 has shared out stay where they are. Nothing here sends.

Groups and parameters may be others at every step: a loaded state brings new groups, a resized embedding is another
tensor. So `Plans` looks at all of them each time, keeps none of what groups say, and lays out anew where a parameter
is another one or lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.optim.newton_schulz import flops
from distmuon.optim.param_groups import check_muon_parameters, named
from distmuon.sharding.boxes import Box, all_of, matrices_of, overlap, within
from distmuon.sharding.collectives import Group
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.local_views import local
from distmuon.sharding.meshes import boxes_on, common_mesh, group_of
from distmuon.sharding.ownership import balance
from distmuon.sharding.precision import default_gather_dtype
from distmuon.sharding.tensor_lists import runs

Groups = Sequence[Mapping[str, Any]]
GPU_BUCKETS = 4  # in a rank's share of a wave, where nobody says how many elements
Matrix = tuple[int, int]  # (the parameter's place in the plan, which of its matrices)

# ---- Who orthogonalizes what ------------------------------------------------------------------------------


class ShardedParam(NamedTuple):
    """A parameter as all ranks hold it. boxes: of every rank, in the order of the group. matrices: (box, [A, B])."""

    boxes: Sequence[Box]
    matrices: Sequence[tuple[Box, tuple[int, int]]]


class MatrixShard(NamedTuple):
    """A box of a matrix, in the coordinates of the whole parameter."""

    matrix: Matrix
    box: Box


class ExchangePlan:
    """The plan of a step as one rank of the group sees it.

    owner: {matrix: rank}, of all. mine: the matrices that this rank owns. loads: what each rank has to do by then, of
        the plans before this one too, in operations.
    out, coming: for every rank, the pieces that go there and come from there before Newton–Schulz; back, returning:
        the same after it. This rank's own part is among them.
    """

    def __init__(self, parameters: Sequence[ShardedParam], ranks: int, rank: int, loads: Sequence[float] = ()) -> None:
        self.parameters, self.rank = parameters, rank
        self.owner, self.loads = owners(parameters, ranks, loads)
        self.mine = [matrix for matrix, owner in self.owner.items() if owner == rank]
        self.out: list[list[MatrixShard]] = [[] for _ in range(ranks)]
        self.coming: list[list[MatrixShard]] = [[] for _ in range(ranks)]
        self.back: list[list[MatrixShard]] = [[] for _ in range(ranks)]
        self.returning: list[list[MatrixShard]] = [[] for _ in range(ranks)]
        for matrix in self.owner:
            self._add(matrix)

    def whole(self, matrix: Matrix) -> tuple[Box, tuple[int, int]]:
        """Return the box of a matrix, and its shape [A, B]."""
        return self.parameters[matrix[0]].matrices[matrix[1]]

    def _add(self, matrix: Matrix) -> None:
        """Add the ways of a matrix: each box from one of its holders to the owner, and from there to all of them."""
        owner, (whole, _) = self.owner[matrix], self.whole(matrix)
        for box, ranks in _holders(self.parameters[matrix[0]].boxes, whole).items():
            piece = MatrixShard(matrix, box)
            sender = owner if owner in ranks else ranks[sum(matrix) % len(ranks)]  # replicas take turns
            if sender == self.rank:
                self.out[owner].append(piece)
            if owner == self.rank:
                self.coming[sender].append(piece)
                for rank in ranks:
                    self.back[rank].append(piece)
            if self.rank in ranks:
                self.returning[owner].append(piece)


def owners(
    parameters: Sequence[ShardedParam], ranks: int, loads: Sequence[float] = ()
) -> tuple[dict[Matrix, int], list[float]]:
    """Return who orthogonalizes each matrix, in the order of the parameters, and the loads then. loads: before it."""
    loads, found, dealt = list(loads or [0.0] * ranks), dict[Matrix, int](), dict[Matrix, float]()
    for index, placed in enumerate(parameters):
        for number, (whole, shape) in enumerate(placed.matrices):
            touching = [rank for of_box in _holders(placed.boxes, whole).values() for rank in of_box]
            if len(touching) == 1:
                found[index, number] = touching[0]
                loads[touching[0]] += flops(shape)
            else:
                dealt[index, number] = float(flops(shape))
    dealt_to = balance(dict(enumerate(dealt.values())), ranks, loads)
    for place, (matrix, cost) in enumerate(dealt.items()):
        found[matrix] = dealt_to[place]
        loads[dealt_to[place]] += cost
    return dict(sorted(found.items())), loads


def _holders(boxes: Sequence[Box], whole: Box) -> dict[Box, list[int]]:
    """Return the pieces into which a matrix is cut, and the ranks that hold each."""
    found: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        if (common := overlap(box, whole)) is not None:
            found.setdefault(common, []).append(rank)
    return found


# ---- The plans of a step ----------------------------------------------------------------------------------


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
        bucket_size: int | None,
        ledger: Ledger,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._gather_dtype, self._bucket_size, self._ledger, self._replicas = (
            gather_dtype,
            bucket_size,
            ledger,
            replicas,
        )
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
            self._plans = self._lay_out(groups, known)
            self._laid_out = now
        return self._plans

    def _lay_out(self, groups: Groups, known: Mapping[Tensor, Any]) -> list[Plan]:
        kinds: dict[tuple[bool, torch.dtype], list[Parameter]] = {}
        for number, options in enumerate(groups):
            if options["algorithm"] != "muon":
                continue
            check_muon_parameters(options, known)  # which may be others than at construction
            for name, p in named(options):
                if _may_move(p):
                    dtype = self._gather_dtype or default_gather_dtype(p.dtype)
                    kinds.setdefault((isinstance(p, DTensor), dtype), []).append(Parameter(name, p, number))
        mesh = common_mesh([pair for group in groups for pair in named(group)])
        if mesh is not None and self._replicas is not None:
            raise ValueError(
                "replicas is given, and there are DTensors, whose mesh says already who holds copies; leave replicas "
                "out, and add a dimension of replicas to the mesh (HSDP)."
            )
        alone = Group("mesh", ledger=self._ledger)
        if self._replicas is not None:
            alone = Group.of_process_group("replicas", self._replicas, self._ledger)
        self.everybody = alone if mesh is None else group_of(mesh, self._ledger)
        plans = []
        for (placed, dtype), parameters in kinds.items():
            group, loads = self.everybody if placed else alone, list[float]()
            # a wave gives every rank about a bucket to orthogonalize, if its matrices can be shared out evenly
            on_gpu = local(parameters[0].tensor).is_cuda
            bucket = self._bucket_size or DEFAULT_BUCKET_SIZE * (GPU_BUCKETS if on_gpu else 1)
            for wave in runs(parameters, [p.tensor.numel() for p in parameters], bucket * group.size):
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
        return sorted(plans, key=lambda plan: plan.group.size == 1)


def _looks(parameter: Tensor, group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return all that a plan depends on. The option is written out: a list may change in place."""
    placed = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
    option = (repr(group["matrices"]), _may_move(parameter)) if group["algorithm"] == "muon" else None
    return id(parameter), parameter.shape, parameter.dtype, parameter.device, placed, option


def _may_move(parameter: Tensor) -> bool:
    """Say whether a parameter has to be laid out: a frozen one, until it is unfrozen, travels nowhere."""
    return parameter.requires_grad or parameter.grad is not None
