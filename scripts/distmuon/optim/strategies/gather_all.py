"""gather_all, as the proof of concept does: every DP rank gathers every bucket, every TP rank every matrix.

A bucket's momentum is all-gathered whole, whatever lies in it: elements that belong to AdamW travel as zeros, and so
does the padding. Each DP rank then keeps the matrices of which it owns at least one element; a matrix that straddles a
shard boundary is orthogonalized by all its owners, and by all their TP ranks, who do the same work side by side.
Source: the proof of concept of Moonlight (Liu et al. 2025), described in our words by what it moves.

    dp_gather       this rank's pieces, packed into its shard   ->  the bucket  ->  TP-local matrices    all-gather
    tp_gather       TP-local matrices                           ->  whole matrices                       all-gather
    newton_schulz   whole matrices                              ->  whole updates
    tp_shard        whole updates                               ->  this TP rank's blocks                nothing sent
    dp_shard        this TP rank's blocks                       ->  this rank's pieces                   nothing sent
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from distmuon.optim.strategies.costs import PlannedRank, StrategyCosts, WholeMatrices, by_all_owners
from distmuon.optim.strategies.strategy import BucketGroup, Strategy, Tensors, momentum_label
from distmuon.sharding import layout
from distmuon.sharding.hooks import hooked
from distmuon.sharding.layout import Bucket, Layout, ParamSpec
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_lists import copy_each_


class GatherAll(Strategy):
    """The five moves of gather_all, one bucket at a time."""

    STARTS_UNREAD: ClassVar = True

    @staticmethod
    def plan(specs: Sequence[ParamSpec], muon: Collection[int], dp: int, tp: int, bucket_size: int) -> Layout:
        """Return ZeRO-1's map, which is the same whichever parameters are Muon's."""
        return layout.plan(specs, dp, bucket_size)

    @hooked
    def dp_gather(
        self,
        buckets: BucketGroup,
        momentum: Tensors,  # M[N_dp]: this rank's pieces
    ) -> dict[int, Tensor]:  # M[I_tp, J]
        """Pieces -> all-gather over DP -> the TP-local matrices that this rank owns pieces of."""
        (bucket,) = buckets
        if not self.context.groups.keys() & set(bucket.params):
            return {}  # nothing for Muon in this bucket, on any rank
        gathered = self.context.grid.dp.all_gather(  # [padded]
            self.pack(bucket, momentum),
            momentum_label(bucket),
        )
        return self.unpack(bucket, gathered, momentum.keys())

    @hooked
    def tp_gather(
        self,
        buckets: BucketGroup,
        blocks: Tensors,  # M[I_tp, J] or M[I, J_tp]
    ) -> dict[int, Tensor]:  # M[I, J]
        """TP-local matrices -> all-gather over TP along the cut -> whole matrices."""
        matrices, whole = dict[int, Tensor](), list[int]()
        for index, block in blocks.items():
            spec = self.context.layout.specs[index]
            if spec.tp_gather_dim is None or self.context.grid.tp.size == 1:
                # a copy: Newton–Schulz overwrites it, and its last bits depend on alignment
                matrices[index] = torch.empty_like(block)
                whole.append(index)
            else:
                matrices[index] = self.context.grid.tp.all_gather_blocks(
                    block, spec.tp_gather_dim, label=f"momentum, {spec.name}"
                )
        copy_each_((matrices[index], blocks[index]) for index in whole)
        return matrices

    @hooked
    def tp_shard(
        self,
        buckets: BucketGroup,
        updates: Tensors,  # O[I, J]
    ) -> dict[int, Tensor]:  # O[I_tp, J] or O[I, J_tp]
        """Whole updates -> this TP rank's block: the opposite arrow, without a collective."""
        blocks, tp = {}, self.context.grid.tp
        for index, update in updates.items():
            spec = self.context.layout.specs[index]
            if spec.tp_gather_dim is None:
                blocks[index] = update
            else:
                blocks[index] = update.chunk(tp.size, spec.tp_gather_dim)[tp.rank]
        return blocks

    @hooked
    def dp_shard(
        self,
        buckets: BucketGroup,
        blocks: Tensors,  # O[I_tp, J]
    ) -> dict[int, Tensor]:  # O[N_dp]
        """TP-local updates -> this rank's pieces: the opposite arrow, without a collective."""
        own = {index: self.context.metas[index].range_in_param for index in blocks}
        return {i: block.reshape(-1)[own[i].as_slice] for i, block in blocks.items()}

    def pack(
        self,
        bucket: Bucket,
        momentum: Tensors,  # M[N_dp]
    ) -> Tensor:  # [shard_size], in the gather dtype
        """Return this rank's shard of the bucket: pieces in place, zeros elsewhere."""
        dtype = self.context.wire_dtype((bucket,))
        shard = torch.zeros(bucket.shard_size, dtype=dtype, device=self.context.grid.device)
        origin = bucket.shard(self.context.grid.dp.rank).start
        places = {i: self.context.metas[i].local_range.relative_to(origin).as_slice for i in momentum}
        copy_each_((shard[places[index]], piece) for index, piece in momentum.items())
        return shard

    def unpack(
        self,
        bucket: Bucket,
        gathered: Tensor,  # [padded]
        indices: Collection[int],
    ) -> dict[int, Tensor]:  # M[I_tp, J]
        """Return the matrices `indices` as views of the gathered bucket: pack's opposite."""
        blocks = {}
        for index in indices:
            meta = self.context.metas[index]
            where = meta.global_range.relative_to(bucket.offset)
            blocks[index] = gathered[where.as_slice].view(meta.shape)
        return blocks


# ---- What it costs ----------------------------------------------------------------------------------------


def sends(ledger: Ledger, at: PlannedRank) -> None:
    """Add to `ledger` what a rank sends between momentum and apply in one step."""
    for bucket in at.layout.buckets:
        if at.muon & set(bucket.params):
            _, size = at.momentum_bytes(bucket)
            ledger.record("all_gather", "dp", at.layout.dp, bucket.padded * size, momentum_label(bucket))
            at.gather_over_tp(ledger, bucket)


def allocates(at: PlannedRank) -> int:
    """Return a bound, in bytes, of what one bucket group's moves allocate, for the worst bucket.

    w b             the momentum's pieces
    + m (b + B)     the shard, and the gathered bucket
    + m L           the copy that puts blocks cut along dimension 1 side by side
    + whole matrices, and Newton–Schulz: see `WholeMatrices`

    with B elements in the bucket (padded), b = B / D in a shard and L in the largest whole matrix; w
    and m bytes per element of the momentum and of the gather. Of the whole matrices of which a rank
    owns a part, only the two at the ends of its shard can stick out of it: the bound grows with the
    bucket and the largest matrix, never with the model.
    """
    worst = 0
    for bucket in at.layout.buckets:
        if at.muon & set(bucket.params):
            w, m = at.momentum_bytes(bucket)
            whole = WholeMatrices.of((at.layout.specs[i] for i in at.owned(bucket)), at.tp)
            flat = w * bucket.shard_size + m * (bucket.shard_size + bucket.padded + whole.largest)
            worst = max(worst, flat + whole.bytes(m, at.compute_bytes))
    return worst


STRATEGY = GatherAll
COSTS = StrategyCosts(sends, allocates, by_all_owners)
