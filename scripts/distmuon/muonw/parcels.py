"""Who orthogonalizes which matrix, and what travels for it: one plan of two exchanges, the same on every rank.

    pieces of the momentum   ->  the owner of each matrix      all-to-all
    pieces of the update     ->  everybody who holds them      all-to-all

A matrix has one owner in the whole mesh, replicas included; the costliest are dealt out first, each to whoever has
least. What a rank alone holds whole it owns: experts that FSDP2 has shared out stay where they are. Nothing here sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distmuon.muonw.boxes import Box, overlap, volume
from distmuon.optim.newton_schulz import flops

Matrix = tuple[int, int]  # (the parameter's place in the plan, which of its matrices)


class Placed(NamedTuple):
    """A parameter as all ranks hold it. boxes: of every rank, in the order of the group. matrices: (box, [A, B])."""

    boxes: Sequence[Box]
    matrices: Sequence[tuple[Box, tuple[int, int]]]


class MatrixPiece(NamedTuple):
    """A box of a matrix, in the coordinates of the whole parameter."""

    matrix: Matrix
    box: Box


class Parcels:
    """The plan of a step as one rank of the group sees it.

    owner: {matrix: rank}, of all. mine: the matrices that this rank owns.
    out, coming: for every rank, the pieces that go there and come from there before Newton–Schulz; back, returning:
        the same after it. this rank's own part is among them.
    """

    def __init__(self, parameters: Sequence[Placed], ranks: int, rank: int) -> None:
        self.parameters, self.rank = parameters, rank
        self.owner = owners(parameters, ranks)
        self.mine = [matrix for matrix, owner in self.owner.items() if owner == rank]
        self.out: list[list[MatrixPiece]] = [[] for _ in range(ranks)]
        self.coming: list[list[MatrixPiece]] = [[] for _ in range(ranks)]
        self.back: list[list[MatrixPiece]] = [[] for _ in range(ranks)]
        self.returning: list[list[MatrixPiece]] = [[] for _ in range(ranks)]
        for matrix in self.owner:
            self._add(matrix)

    def whole(self, matrix: Matrix) -> tuple[Box, tuple[int, int]]:
        """Return the box of a matrix, and its shape [A, B]."""
        return self.parameters[matrix[0]].matrices[matrix[1]]

    def _add(self, matrix: Matrix) -> None:
        """Add the ways of a matrix: each box from one of its holders to the owner, and from there to all of them."""
        owner, (whole, _) = self.owner[matrix], self.whole(matrix)
        holders: dict[Box, list[int]] = {}
        for rank, box in enumerate(self.parameters[matrix[0]].boxes):
            if (common := overlap(box, whole)) is not None:
                holders.setdefault(common, []).append(rank)
        for box, ranks in holders.items():
            piece = MatrixPiece(matrix, box)
            sender = owner if owner in ranks else ranks[sum(matrix) % len(ranks)]  # replicas take turns
            if sender == self.rank:
                self.out[owner].append(piece)
            if owner == self.rank:
                self.coming[sender].append(piece)
                for rank in ranks:
                    self.back[rank].append(piece)
            if self.rank in ranks:
                self.returning[owner].append(piece)


def owners(parameters: Sequence[Placed], ranks: int) -> dict[Matrix, int]:
    """Return who orthogonalizes each matrix, in the order of the parameters."""
    loads, fixed, dealt = [0.0] * ranks, {}, []
    for index, held in enumerate(parameters):
        for number, (whole, shape) in enumerate(held.matrices):
            touching = [rank for rank, box in enumerate(held.boxes) if overlap(box, whole) is not None]
            cost, matrix = float(flops(shape)), (index, number)
            if len(touching) == 1:
                fixed[matrix] = touching[0]
                loads[touching[0]] += cost
            else:
                dealt.append((-cost, matrix))
    for cost, matrix in sorted(dealt):
        fixed[matrix] = loads.index(min(loads))
        loads[fixed[matrix]] -= cost
    return dict(sorted(fixed.items()))


def numel(pieces: Sequence[MatrixPiece]) -> int:
    """Return how many elements these pieces have together."""
    return sum(volume(piece.box) for piece in pieces)
