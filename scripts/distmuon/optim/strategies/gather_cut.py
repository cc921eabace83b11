"""gather_cut, as the paper's author meant it: only what a shard boundary cuts travels, and only among its owners.

A matrix that lies whole in a shard stays where it is. Of any other, every owner sends its piece to all the others, in
one all-to-all per bucket; what a rank owns nothing of, it never sees. The owners still orthogonalize a cut matrix side
by side, and over TP all is as in gather_all. Few boundaries cut few matrices, so this wants long shards: a
`bucket_size` beyond the model (`layout.FLAT`). Source: the discussion of Moonlight's proof of concept (Megatron-LM
pull request 1428).

    dp_gather       this rank's pieces   ->  TP-local matrices     all-to-all
    the other four                                                 as in gather_all
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from distmuon.optim.strategies.gather_all import GatherAll
from distmuon.optim.strategies.strategy import BucketGroup, Tensors, momentum_label
from distmuon.sharding.hooks import hooked


class GatherCut(GatherAll):
    """gather_all, but for what travels over DP."""

    STARTS_UNREAD: ClassVar = False  # pieces are joined as soon as they are here

    @hooked
    def dp_gather(
        self,
        buckets: BucketGroup,
        momentum: Tensors,  # M[N_dp]: this rank's pieces
    ) -> dict[int, Tensor]:  # M[I_tp, J]
        """Pieces of cut matrices -> all their owners -> the TP-local matrices that this rank owns pieces of."""
        (bucket,) = buckets
        dp, dtype, layout = self.context.grid.dp, self.context.wire_dtype(buckets), self.context.layout
        owners = {index: layout.owners(bucket, index) for index in bucket.params if index in self.context.groups}
        pieces = {(index, dp.rank): piece.to(dtype) for index, piece in momentum.items()}
        if any(len(ranks) > 1 for ranks in owners.values()):  # on any rank: all join the call, or none does
            shared = [[i for i in momentum if rank in owners[i] and rank != dp.rank] for rank in range(dp.size)]
            lengths = [[layout.meta(bucket, i, rank).local_range.size for i in shared[rank]] for rank in range(dp.size)]
            nothing = torch.empty(0, dtype=dtype, device=self.context.grid.device)
            parcels = [torch.cat([pieces[i, dp.rank] for i in theirs] or [nothing]) for theirs in shared]
            received = dp.exchange(parcels, [sum(sizes) for sizes in lengths], momentum_label(bucket))
            for rank, parcel in enumerate(received):
                for index, piece in zip(shared[rank], parcel.split(lengths[rank]), strict=True):
                    pieces[index, rank] = piece
        return {
            index: torch.cat([pieces[index, rank] for rank in owners[index]]).view(self.context.metas[index].shape)
            for index in momentum
        }


STRATEGY = GatherCut
