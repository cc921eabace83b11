"""gather_cut, as the paper's author meant it: only what a shard boundary cuts travels, and only among its owners.

Of a cut matrix every owner sends its piece to all the others, in one all-to-all per bucket; what a rank owns nothing
of, it never sees. The owners still orthogonalize a cut matrix side by side, and over TP all is as in gather_all. Few
boundaries cut few matrices, so this wants long shards: a `bucket_size` beyond the model (`layout.FLAT`). Source: the
discussion of Moonlight's proof of concept (Megatron-LM pull request 1428).

A matrix that lies whole in a shard stays where it is, and is taken after those that were cut: a large one by itself,
small ones together, so that of a long shard of large matrices few are whole at a time. One by one is the paper's own
order (Moonlight, Algorithm 1).

    dp_gather       this rank's pieces   ->  TP-local matrices     all-to-all, in the first wave
    the other four                                                 as in gather_all
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from distmuon.optim.fast_paths import batching_pays
from distmuon.optim.strategies.costs import PlannedRank, StrategyCosts, WholeMatrices, by_all_owners
from distmuon.optim.strategies.gather_all import GatherAll
from distmuon.optim.strategies.strategy import BucketGroup, Tensors, momentum_label
from distmuon.sharding.hooks import hooked
from distmuon.sharding.layout import Bucket, Layout, ParamSpec
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_lists import cast

TOGETHER = 2**21  # elements of the largest matrix that shares a wave, where all that do are whole at once


class GatherCut(GatherAll):
    """gather_all, but for what travels over DP, and in waves."""

    STARTS_UNREAD: ClassVar = False  # pieces are joined as soon as they are here

    @cached_property
    def owners(self) -> dict[Bucket, dict[int, range]]:
        """The DP ranks that own pieces of each of Muon's matrices, bucket by bucket."""
        layout, muon = self.context.layout, self.context.groups
        return {b: {i: layout.owners(b, i) for i in b.params if i in muon} for b in layout.buckets}

    def waves(self, buckets: BucketGroup, indices: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return what is cut first, for that is waited for, also where nothing is; then small ones, then each other."""
        (bucket,) = buckets
        owners = self.owners[bucket]
        cut, here = ([i for i in indices if (len(owners[i]) > 1) == is_cut] for is_cut in (True, False))
        small, large = ([i for i in here if self._is_small(i) == is_small] for is_small in (True, False))
        return [cut, *([small] if small else []), *([index] for index in large)]

    def _is_small(self, index: int) -> bool:
        """Say whether Newton–Schulz takes this parameter's matrices in batches, and all of them have room."""
        grid, spec = self.context.grid, self.context.layout.specs[index]
        batched = self.context.groups[index]["batched"] and may_share_a_wave(spec, grid.tp.size)
        return batched and all(batching_pays(part.shape, grid.device) for part in spec.seen_parts(grid.tp.size))

    @hooked
    def dp_gather(
        self,
        buckets: BucketGroup,
        momentum: Tensors,  # M[N_dp]: this rank's pieces, of one wave
    ) -> dict[int, Tensor]:  # M[I_tp, J]
        """Pieces of cut matrices -> all their owners -> the TP-local matrices that this rank owns pieces of.

        Raises ValueError for a mixture of cut ones and others, which no wave is: ranks would not agree on who sends.
        """
        (bucket,) = buckets
        dp, dtype, layout = self.context.grid.dp, self.context.wire_dtype(buckets), self.context.layout
        owners = self.owners[bucket]
        cut = {index for index, ranks in owners.items() if len(ranks) > 1}
        if momentum.keys() & cut and momentum.keys() - cut:
            raise ValueError("matrices that are cut and others come in one wave; take them apart, as `waves` does.")
        here = zip(momentum, cast(list(momentum.values()), dtype), strict=True)
        pieces = {(index, dp.rank): piece for index, piece in here}
        if cut and momentum.keys() <= cut:  # the first wave; all join the call, also those that have nothing cut
            shared = [[i for i in momentum if rank in owners[i]] for rank in range(dp.size)]
            shapes = [
                [[layout.meta(bucket, i, rank).local_range.size] for i in shared[rank]] for rank in range(dp.size)
            ]
            nothing = torch.empty(0, dtype=dtype, device=self.context.grid.device)
            parcels = [[pieces[i, dp.rank] for i in of_rank] for of_rank in shared]
            received = dp.exchange(parcels, shapes, momentum_label(bucket), nothing)
            for rank, of_rank in enumerate(received.tensors):
                pieces |= {(index, rank): piece for index, piece in zip(shared[rank], of_rank, strict=True)}
        joined = {i: [pieces[i, rank] for rank in owners[i]] for i in momentum}
        return {
            i: (torch.cat(all_of_it) if i in cut else all_of_it[0]).view(self.context.metas[i].shape)
            for i, all_of_it in joined.items()
        }


def may_share_a_wave(spec: ParamSpec, tp: int) -> bool:
    """Say whether this parameter's matrices, as a rank sees them, are small enough for a wave with others."""
    return all(math.prod(part.shape) <= TOGETHER for part in spec.seen_parts(tp))


# ---- What it costs ----------------------------------------------------------------------------------------


def sends(ledger: Ledger, at: PlannedRank) -> None:
    """Add what one step sends: this rank's pieces of cut matrices to all their other owners; over TP as gather_all."""
    for bucket in at.layout.buckets:
        if any(len(at.layout.owners(bucket, index)) > 1 for index in bucket.params if index in at.muon):
            _, size = at.momentum_bytes(bucket)
            sent = size * _packed(at, bucket, at.owned(bucket))
            ledger.record("all_to_all", "dp", at.layout.dp, sent, momentum_label(bucket), sent_bytes=sent)
        at.gather_over_tp(ledger, bucket)


def allocates(at: PlannedRank) -> int:
    """Return a bound, in bytes, of what one wave allocates, for the worst; see `gather_cut_bound`."""
    worst, specs = 0, at.layout.specs
    for bucket in at.layout.buckets:
        sizes = at.momentum_bytes(bucket)
        cut, small, large = gather_cut_waves(at.layout, bucket, at.owned(bucket), at.tp)
        for wave in (cut, small, *([index] for index in large)):
            pieces = sum(at.layout.meta(bucket, i, at.dp_rank).local_range.size for i in wave)
            joined = sum(specs[i].numel for i in wave if wave is cut)
            whole = WholeMatrices.of((specs[i] for i in wave), at.tp)
            bound = gather_cut_bound(pieces, _packed(at, bucket, wave), joined, whole, sizes, at.compute_bytes)
            worst = max(worst, bound)
    return worst


def gather_cut_waves(
    layout: Layout, bucket: Bucket, indices: Collection[int], tp: int
) -> tuple[list[int], list[int], list[int]]:
    """Return which of these matrices are cut; which of the others are small to some device, and go together; the rest.

    What a device takes singly although another would not, it takes with less room than is bounded here.
    """
    cut, small, large = list[int](), list[int](), list[int]()
    for index in indices:
        if len(layout.owners(bucket, index)) > 1:
            cut.append(index)
        else:
            (small if may_share_a_wave(layout.specs[index], tp) else large).append(index)
    return cut, small, large


def gather_cut_bound(
    pieces: int, packed: int, joined: int, whole: WholeMatrices, sizes: tuple[int, int], compute: int
) -> int:
    """Return a bound, in bytes, of what one wave allocates; signs as in `gather_all.allocates`.

    w b                             the momentum's pieces
    + m b                           in the dtype in which they travel
    + m S                           packed: a piece once for every other owner
    + 2 m L'                        what came, and TP-local matrices joined, of the first wave
    + m L                           the copy that puts blocks cut along dimension 1 side by side
    + whole matrices, and Newton–Schulz: see `WholeMatrices`

    with b = `pieces`, S = `packed`, L' = `joined` and L = `whole.largest` elements; `sizes` are w and m of
    `momentum_bytes`.
    """
    w, m = sizes
    return (w + m) * pieces + m * (packed + 2 * joined + whole.largest) + whole.bytes(m, compute)


def _packed(at: PlannedRank, bucket: Bucket, owned: Collection[int]) -> int:
    """Return how many elements a rank sends: each of its pieces, once to every other owner of that matrix."""
    others = {index: len(at.layout.owners(bucket, index)) - 1 for index in owned}
    return sum(count * at.layout.meta(bucket, i, at.dp_rank).local_range.size for i, count in others.items())


STRATEGY = GatherCut
COSTS = StrategyCosts(sends, allocates, by_all_owners, in_waves=True)
