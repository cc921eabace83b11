"""Which box of a tensor every rank of a mesh holds, from its DTensor placements: integers alone, no collective.

A *box* is a rectangle of a tensor: [begin, end) along every dimension. FSDP2 and tensor parallelism cut along whole
dimensions, so what a rank holds of a parameter is one box, and may be empty. What Newton–Schulz wants is a box, too:
a matrix, or one of several in a parameter (`sharding.matrices`). The rest is intersections.

FSDP2 over TP shards the TP-local block: dp cuts what tp has left over. DTensor writes that down the other way round,
dp first and *strided*; here strided placements are taken last.

    (_StridedShard(0), Shard(0))     dp, tp of a column-wise weight: rows, first in T parts, each of them in D
    (Shard(0), Shard(1))             dp, tp of a row-wise weight: columns in T parts, rows in D
    (Replicate(), Shard(0))          hybrid: rows, the same on every replica

Where TP's parts are unequal, DTensor's own metadata is wrong about FSDP2's cuts of them. What ranks really hold is as
written here, so nothing in this room asks DTensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from distmuon.sharding.layout import Range
from distmuon.sharding.matrices import NUMBERED, Matrices, kind_of, parts

Box = tuple[Range, ...]  # along every dimension


def boxes(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[Box]:
    """Return the box of every rank of the mesh, in the order of its flattened coordinates.

    shape: of the whole tensor. Parts are as torch.chunk makes them: the last ones may be shorter, or empty.
    Raises ValueError for a placement that is neither a shard nor a replica.
    """
    coordinates = itertools.product(*map(range, mesh_shape))
    return [box_at(shape, mesh_shape, placements, coordinate) for coordinate in coordinates]


def box_at(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> Box:
    """Return the box of one rank of the mesh; see `boxes`."""
    strided = [dim for dim, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    order = [dim for dim in range(len(placements)) if dim not in strided] + strided
    box = list(all_of(shape))
    for mesh_dim in order:
        placement = placements[mesh_dim]
        if isinstance(placement, Shard | _StridedShard):
            box[placement.dim] = _chunk(box[placement.dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
        elif not isinstance(placement, Replicate):
            raise ValueError(f"a parameter is placed as {placement}, which is neither a shard nor a replica.")
    return tuple(box)


def matrices_of(matrices: Matrices, shape: Sequence[int]) -> list[tuple[Box, tuple[int, int]]]:
    """Return the matrices in a whole parameter: the box of each, and its shape [A, B]."""
    everything = all_of(shape)
    kind, found, start = kind_of(matrices), [], 0
    cut = NUMBERED.get(kind, 0)  # the dimension along which matrices follow each other
    for same in parts(matrices, shape):
        length = (shape[1] if cut else same.rows) // same.number
        for number in range(same.number):
            begin = start + number * length
            found.append(((*everything[:cut], Range(begin, begin + length), *everything[cut + 1 :]), same.shape))
        start += same.rows
    return found


def all_of(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple(Range(0, size) for size in shape)


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes have in common; None for nothing."""
    common = tuple(a.intersect(b) for a, b in zip(one, other, strict=True))
    return common if volume(common) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return where a box lies in a tensor that holds the box `outer`."""
    return tuple(a.relative_to(b.start).as_slice for a, b in zip(box, outer, strict=True))


def volume(box: Box) -> int:
    """Return the number of elements."""
    return math.prod(side.size for side in box)


def extent(box: Box) -> tuple[int, ...]:
    """Return the shape of a tensor that holds the box."""
    return tuple(side.size for side in box)


def _chunk(whole: Range, count: int, number: int) -> Range:
    """Return part `number` of `count`, as torch.chunk makes them."""
    length = -(-whole.size // count) if whole.size else 0
    begin = min(whole.end, whole.start + number * length)
    return Range(begin, min(whole.end, begin + length))
