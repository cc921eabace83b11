"""One owner per matrix: a map whose shards end between matrices, and who of the grid orthogonalizes which.

ZeRO-1 cuts wherever D equal cuts fall, and AdamW does not mind. Here Muon's matrices are dealt out whole, and shards
are as long as what they hold: the reduce-scatter then lands whole (TP-local) matrices at their owners.

    bucket   [  W3   |   W1   | W5 |    W2    |  W4  |  W6 ]      no padding
    shards   |     rank 0     |    rank 1     |   rank 2   |

What belongs to AdamW follows in buckets of equal shards. Nothing here imports torch, and every process that asks gets
the same answer. Sources: longest processing time first is Graham's rule (1969); whole matrices per rank are Keller
Jordan's distributed Muon (2024), at whose owners ZeRO-1's own collective puts them here.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from distmuon.sharding.layout import Bucket, Buffer, Layout, ParamSpec, by_dtype, equal_buckets, gradient_dtype


class Owner(NamedTuple):
    """A rank of the grid. tp: None for a whole row of it, each rank of which has matrices of its own."""

    dp: int
    tp: int | None


def balance(costs: Mapping[int, float], ranks: int, loads: Sequence[float] = ()) -> dict[int, int]:
    """Deal out items over `ranks`, the costliest first, each to the rank that has least so far: {item: rank}.

    loads: what the ranks have already, if anything.
    Ties go to the smaller item and to the smaller rank. On m ranks that start with nothing no rank ends above
    4/3 - 1/(3m) of the best possible (Graham 1969); on ranks that start with loads, none above 3/2 - 1/(2m) (Lee 1991).
    """
    return {item: owner.dp for item, owner in owners(costs, ranks, 1, loads=loads).items()}


def owners(
    costs: Mapping[int, float], dp: int, tp: int, by_rows: Collection[int] = (), loads: Sequence[float] = ()
) -> dict[int, Owner]:
    """Return who orthogonalizes each parameter: balanced over the whole grid, all rows of it before a second column.

    costs: {index in the map: cost of the whole parameter}, in any unit. by_rows: those of which each TP rank has whole
    matrices (`ParamSpec.tp_local_matrices`), so that all of a row share the work; they go to the row whose busiest rank
    has least. loads: what each rank has already; (): nothing.
    """
    loads = list(loads or [0.0] * (dp * tp))
    least = [(load, rank) for rank, load in enumerate(loads)]  # to be a heap: equal loads in the order of ranks
    heapq.heapify(least)
    each = {index: cost / tp if index in by_rows else cost for index, cost in costs.items()}
    found = {}
    for index in sorted(costs, key=lambda index: (-each[index], index)):
        while least[0][0] != loads[least[0][1]]:
            heapq.heappop(least)  # that rank has got more since
        rank = least[0][1]
        owner, ranks = Owner(rank % dp, rank // dp), range(rank, rank + 1)
        if index in by_rows:
            row = min(range(dp), key=lambda row: (max(loads[row::dp]), row))
            owner, ranks = Owner(row, None), range(row, dp * tp, dp)
        found[index] = owner
        for rank in ranks:
            loads[rank] += each[index]
            heapq.heappush(least, (loads[rank], rank))
    return found


def plan_unsplit(specs: Iterable[ParamSpec], costs: Mapping[int, float], dp: int, tp: int, bucket_size: int) -> Layout:
    """Lay parameters out so that no shard boundary cuts a matrix of Muon's.

    costs: as in `owners`, of Muon's matrices. Each owner's matrices are spread over as many buckets as hold about
    `bucket_size` elements, so that the work on one bucket can hide the wire of another. Raises as `plan` does.
    """
    specs = tuple(specs)
    owner_of = owners(costs, dp, tp, tp_local_matrices(specs, costs))
    buffers = []
    for number, (dtype, indices) in enumerate(by_dtype(specs, dp, bucket_size).items()):
        matrices = {index: owner_of[index].dp for index in indices if index in owner_of}
        buckets = _whole_buckets(specs, costs, matrices, dp, bucket_size, number)
        rest = [index for index in indices if index not in owner_of]
        buckets = equal_buckets(specs, rest, dp, bucket_size, number, before=buckets)
        buffers.append(Buffer(dtype, gradient_dtype(dtype), tuple(buckets)))
    return Layout(specs, dp, tuple(buffers))


def tp_local_matrices(specs: Sequence[ParamSpec], muon: Collection[int]) -> frozenset[int]:
    """Return those of Muon's parameters of which every TP rank holds whole matrices of its own."""
    return frozenset(index for index in muon if specs[index].tp_local_matrices)


def _whole_buckets(
    specs: Sequence[ParamSpec],
    costs: Mapping[int, float],
    matrices: Mapping[int, int],  # index -> DP rank
    dp: int,
    bucket_size: int,
    buffer_idx: int,
) -> list[Bucket]:
    """Return the buckets of one buffer's matrices: every owner's work in about equal parts, one per bucket."""
    total = sum(specs[index].numel for index in matrices)
    count = max(1, -(-total // bucket_size))
    shards: list[dict[int, list[int]]] = [{} for _ in range(count)]  # [bucket][rank] -> indices
    work, done = [0.0] * dp, [0.0] * dp
    for index, rank in matrices.items():
        work[rank] += costs[index]
    for index in sorted(matrices, key=lambda index: (-costs[index], index)):
        rank = matrices[index]
        place = int(count * done[rank] / work[rank]) if work[rank] else 0
        shards[min(place, count - 1)].setdefault(rank, []).append(index)
        done[rank] += costs[index]
    buckets: list[Bucket] = []
    offset = 0
    for of_ranks in filter(None, shards):
        ends, filled = [], 0
        for rank in range(dp):
            filled += sum(specs[index].numel for index in of_ranks.get(rank, ()))
            ends.append(filled)
        params = tuple(index for rank in sorted(of_ranks) for index in of_ranks[rank])
        buckets.append(Bucket(buffer_idx, len(buckets), params, offset, filled, filled, dp, tuple(ends)))
        offset += filled
    return buckets
