"""One owner per matrix: a map whose shards cut none, and who of the grid orthogonalizes which.

ZeRO-1 cuts a bucket wherever D equal cuts fall, and AdamW does not mind. Here Muon's matrices are dealt out whole, and
every shard is padded to the length of the longest, so that the reduce-scatter lands whole (TP-local) matrices at their
owners, by the backend's own collectives, which want equal shards.

    bucket   [  W6   |   W4   p|  W5 | W2 ppp|   W3   |  W1  ]      p = padding
    shards   |     rank 0      |   rank 1    |    rank 2     |

A bucket is a run of matrices in the order in which the backward pass finishes their gradients, the last layer's first,
and each bucket is dealt out by itself: it can be reduced while earlier layers are still at work. A run ends where it
holds `bucket_size` elements and can be dealt with little padding (`MAX_PADDING`); where too few matrices are left for
that, they join as many runs before them as makes padding least. On more ranks than matrices there is nothing to deal,
and padding has no bound: a shard is as long as the largest matrix. `Layout.padding` says what it came to.

What belongs to AdamW follows in ZeRO-1's buckets. Nothing here imports torch, and every process that asks gets the
same answer. Sources: longest processing time first is Graham's rule (1969); whole matrices per rank are Keller Jordan's
distributed Muon (2024), at whose owners ZeRO-1's own collective puts them here; padded shards inside runs of backward
order are also the layout of Megatron-LM's layer-wise optimizer (2026).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from distmuon.sharding.layout import ITEM_BYTES, Bucket, Buffer, Layout, ParamSpec, by_dtype, zero1_buckets

MAX_PADDING = 0.03  # of a bucket's matrices: less would take larger buckets, and overlap with them; more, memory
MUCH_PADDING, MUCH_BYTES = 0.2, 250_000_000  # of which a user hears: a share, and bytes on a rank


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
    costs: Mapping[int, float],
    dp: int,
    tp: int,
    by_rows: Collection[int] = (),
    loads: Sequence[float] = (),
    earlier: Sequence[float] = (),
) -> dict[int, Owner]:
    """Return who orthogonalizes each parameter: the rank of the grid that has least so far, in the row that has least.

    costs: {index in the map: cost of the whole parameter}, in any unit. by_rows: those of which each TP rank has whole
    matrices (`ParamSpec.tp_local_matrices`), so that all of a row share the work; they go to the row whose busiest rank
    has least. loads: what each rank has already; (): nothing. earlier: what each has done in earlier buckets: of ranks
    that have equally little, in rows that have, the one that has done least takes the next.
    """
    loads, earlier = list(loads or [0.0] * (dp * tp)), list(earlier or [0.0] * (dp * tp))
    rows = [sum(loads[row::dp]) for row in range(dp)]
    each = {index: cost / tp if index in by_rows else cost for index, cost in costs.items()}

    def key(rank: int) -> tuple[float, float, float, int]:
        return loads[rank], rows[rank % dp], earlier[rank], rank

    first = [key(rank) for rank in range(dp * tp)]
    heapq.heapify(first)
    found = {}
    for index in sorted(costs, key=lambda index: (-each[index], index)):
        if index in by_rows:
            row = min(range(dp), key=lambda row: (max(loads[row::dp]), max(earlier[row::dp]), row))
            found[index], ranks = Owner(row, None), range(row, dp * tp, dp)
        else:
            while first[0] != (now := key(first[0][-1])):
                heapq.heapreplace(first, now)  # that rank or its row has got more since: keys only grow
            rank = first[0][-1]
            row = rank % dp
            found[index], ranks = Owner(row, rank // dp), range(rank, rank + 1)
        for rank in ranks:
            loads[rank] += each[index]
        rows[row] = sum(loads[row::dp])
    return found


def plan_owned(specs: Iterable[ParamSpec], costs: Mapping[int, float], dp: int, tp: int, bucket_size: int) -> Layout:
    """Lay parameters out so that no shard boundary cuts a matrix of Muon's.

    costs: as in `owners`, of Muon's matrices. bucket_size: elements that a bucket holds, or more where it takes more to
    deal them out with little padding. Raises as `plan` does.
    """
    specs = tuple(specs)
    buffers, dealer = [], _Dealer(specs, costs, dp, tp)
    for number, (dtype, indices) in enumerate(by_dtype(specs, dp, bucket_size).items()):
        buckets: list[Bucket] = []
        for run in _runs(dealer, [index for index in reversed(indices) if index in costs], bucket_size):
            buckets.append(dealer.bucket(run, number, len(buckets), buckets[-1].range.end if buckets else 0))
        rest = [index for index in indices if index not in costs]
        buckets = zero1_buckets(specs, rest, dp, bucket_size, number, before=buckets)
        buffers.append(Buffer(dtype, tuple(buckets)))
    return Layout(specs, dp, tuple(buffers))


def owners_of(layout: Layout, costs: Mapping[int, float], tp: int) -> dict[int, Owner]:
    """Return who orthogonalizes each matrix of a layout of `plan_owned`, made with these costs: {index: owner}."""
    dealer, found = _Dealer(layout.specs, costs, layout.dp, tp), dict[int, Owner]()
    for bucket in layout.buckets:
        found |= dealer.deal([index for index in bucket.params if index in costs], keep=True)
    return found


def padding_bytes(layout: Layout) -> int:
    """Return the bytes of weights and gradients that padding takes on every rank."""
    kept = 0
    for bucket in layout.buckets:
        buffer = layout.buffers[bucket.buffer_idx]
        kept += (ITEM_BYTES[buffer.param_dtype] + ITEM_BYTES[buffer.grad_dtype]) * (bucket.padded - bucket.numel)
    return kept


def padding_warning(layout: Layout) -> str | None:
    """Return what to tell a user whose ranks keep much padding; None where it is little, in share or in bytes."""
    kept = padding_bytes(layout)
    if layout.padding < MUCH_PADDING or kept < MUCH_BYTES:
        return None
    return (
        f"owners' shards are padded by {layout.padding:.0%} on {layout.dp} DP ranks, which is {kept / 1e9:.1f} GB of "
        "weights and gradients on every rank, because there are too few large matrices to deal out; use fewer DP "
        'ranks, in several replicas, or the strategy "gather_cut".'
    )


class _Dealer:
    """Deals out the matrices of one bucket after the other, and knows what each rank of the grid has done by then."""

    def __init__(self, specs: Sequence[ParamSpec], costs: Mapping[int, float], dp: int, tp: int) -> None:
        self.specs, self.costs, self.dp, self.tp = specs, costs, dp, tp
        self.by_rows = frozenset(index for index in costs if specs[index].tp_local_matrices)
        self.done = [0.0] * (dp * tp)

    def deal(self, run: Collection[int], keep: bool = False) -> dict[int, Owner]:
        """Return the owners of a bucket's matrices. keep: remember what they have to do."""
        found = owners({index: self.costs[index] for index in run}, self.dp, self.tp, self.by_rows, (), self.done)
        if keep:
            for index, owner in found.items():
                row = range(owner.dp, self.dp * self.tp, self.dp)
                ranks = row if owner.tp is None else (row[owner.tp],)
                for rank in ranks:
                    self.done[rank] += self.costs[index] / len(ranks)
        return found

    def padded(self, run: Collection[int]) -> int:
        """Return how long a bucket of these matrices would be, in elements."""
        lengths = [0] * self.dp
        for index, owner in self.deal(run).items():
            lengths[owner.dp] += self.specs[index].numel
        return max(lengths) * self.dp

    def pads_little(self, run: Collection[int]) -> bool:
        """Say whether padding would be at most `MAX_PADDING` of these matrices."""
        sizes = [self.specs[index].numel for index in run]
        most = (1 + MAX_PADDING) * sum(sizes)
        if self.dp * max(sizes, default=0) > most:  # as long as any dealing makes a bucket, at least
            return False
        return self.padded(run) <= most

    def bucket(self, run: Collection[int], buffer_idx: int, bucket_idx: int, offset: int) -> Bucket:
        """Return the next bucket: every owner's matrices at the beginning of its shard."""
        shards: list[list[int]] = [[] for _ in range(self.dp)]
        for index, owner in self.deal(run, keep=True).items():
            shards[owner.dp].append(index)
        lengths = [sum(self.specs[index].numel for index in shard) for shard in shards]
        params, starts = list[int](), list[int]()
        for rank, shard in enumerate(shards):
            start = rank * max(lengths)
            for index in shard:
                params.append(index)
                starts.append(start)
                start += self.specs[index].numel
        padded = self.dp * max(lengths)
        return Bucket(buffer_idx, bucket_idx, tuple(params), tuple(starts), offset, sum(lengths), padded, self.dp)


def _runs(dealer: _Dealer, matrices: Sequence[int], bucket_size: int) -> list[list[int]]:
    """Cut matrices, in this order, into the runs that become buckets."""
    runs: list[list[int]] = [[]]
    filled, enough = 0, float(bucket_size)
    for index in matrices:
        runs[-1].append(index)
        filled += dealer.specs[index].numel
        if filled < enough:
            continue
        if dealer.pads_little(runs[-1]):
            runs.append([])
            filled, enough = 0, float(bucket_size)
        else:
            # asked again by the next matrix while the run is short, later more rarely: dealing takes its length
            enough = filled * (1 + min(1 / 8, len(runs[-1]) / 4096))
    return _joined(dealer, [run for run in runs if run])


def _joined(dealer: _Dealer, runs: list[list[int]]) -> list[list[int]]:
    """Let a last run that would pad much join as many of those before it as makes padding least."""
    if not runs:
        return []
    last, separate = runs[-1], 0
    best, fewest = len(runs) - 1, dealer.padded(last)
    for place in range(len(runs) - 2, -1, -1):
        if dealer.pads_little(last):
            break
        last, separate = runs[place] + last, separate + dealer.padded(runs[place])
        beyond = dealer.padded(last) - separate
        if beyond < fewest:
            best, fewest = place, beyond
    return [*runs[:best], [index for run in runs[best:] for index in run]]
