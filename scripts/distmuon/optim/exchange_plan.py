"""Who orthogonalizes which matrix, and what travels for it: one plan of two exchanges, the same on every rank.

    pieces of the momentum   ->  the owner of each matrix      all-to-all
    pieces of the update     ->  everybody who holds them      all-to-all

A matrix has one owner in the whole mesh, replicas included; the costliest are dealt out first, each to whoever has
least. What a rank alone holds whole it owns: experts that FSDP2 has shared out stay where they are. Nothing here sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distmuon.optim.newton_schulz import flops
from distmuon.sharding.boxes import Box, overlap
from distmuon.sharding.ownership import balance

Matrix = tuple[int, int]  # (the parameter's place in the plan, which of its matrices)


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
