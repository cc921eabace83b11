"""gather_all, the public blueprint: every DP rank gathers every bucket, every TP rank gathers every matrix.

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

import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from distmuon.optim.strategies.strategy import Task, Wave, gather_dtype_name
from distmuon.sharding.layout import ITEM_BYTES, Bucket, Layout
from distmuon.sharding.ledger import Ledger


class GatherAll:
    """The five moves of the blueprint, one bucket at a time."""

    GATHERS_UNREAD: ClassVar = True

    def __init__(self, task: Task) -> None:
        self.task = task

    def waves(self) -> Sequence[Wave]:
        """Return one wave per bucket: while one is gathered, no other takes up memory."""
        return [(bucket,) for bucket in self.task.layout.buckets]

    def dp_gather(self, wave: Wave, momentum: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Pieces of matrices -> all-gather over DP -> the TP-local matrices of which this rank owns a piece."""
        (bucket,) = wave
        if not self.task.groups.keys() & set(bucket.params):
            return {}  # nothing for Muon in this bucket, on any rank
        gathered = self.task.grid.dp.all_gather(self.pack(bucket, momentum), momentum_label(bucket))
        return self.unpack(bucket, gathered, momentum.keys())

    def tp_gather(self, wave: Wave, blocks: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """TP-local matrices -> all-gather over TP along tp_split_dim -> whole matrices."""
        matrices = {}
        for index, block in blocks.items():
            spec = self.task.layout.specs[index]
            if spec.tp_split_dim is None or self.task.grid.tp.size == 1:
                matrices[index] = block.clone()  # Newton–Schulz overwrites it; and its last bits depend on alignment
            else:
                label = f"momentum, {spec.name}"
                matrices[index] = self.task.grid.tp.all_gather_blocks(block, spec.tp_split_dim, label)
        return matrices

    def newton_schulz(self, matrices: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Whole matrices -> their orthogonalized updates."""
        return self.task.orthogonalize(matrices)

    def tp_shard(self, wave: Wave, updates: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Whole updates -> this TP rank's block: the opposite arrow of tp_gather, without a collective."""
        blocks = {}
        for index, update in updates.items():
            spec = self.task.layout.specs[index]
            if spec.tp_split_dim is None:
                blocks[index] = update
            else:
                blocks[index] = update.chunk(self.task.grid.tp.size, spec.tp_split_dim)[self.task.grid.tp.rank]
        return blocks

    def dp_shard(self, wave: Wave, blocks: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """TP-local updates -> the pieces that this rank owns: the opposite arrow of dp_gather, without a collective."""
        return {i: block.reshape(-1)[self.task.metas[i].range_in_param.as_slice] for i, block in blocks.items()}

    def pack(self, bucket: Bucket, momentum: Mapping[int, Tensor]) -> Tensor:
        """Return this rank's shard of the bucket [shard_size] in the gather dtype: pieces in place, zeros elsewhere."""
        grad_dtype = self.task.layout.buffers[bucket.buffer_idx].grad_dtype
        dtype = self.task.gather_dtype or getattr(torch, gather_dtype_name(grad_dtype))
        shard = torch.zeros(bucket.shard_size, dtype=dtype, device=self.task.grid.device)
        origin = bucket.shard(self.task.grid.dp.rank).start
        for index, piece in momentum.items():
            shard[self.task.metas[index].local_range.relative_to(origin).as_slice] = piece
        return shard

    def unpack(self, bucket: Bucket, gathered: Tensor, indices: Collection[int]) -> dict[int, Tensor]:
        """Return the matrices `indices` as views of the gathered bucket [padded]: the opposite arrow of pack."""
        blocks = {}
        for index in indices:
            meta = self.task.metas[index]
            blocks[index] = gathered[meta.global_range.relative_to(bucket.offset).as_slice].view(meta.shape)
        return blocks

    @staticmethod
    def predict(
        ledger: Ledger, layout: Layout, muon: frozenset[int], tp: int, dp_rank: int, item_bytes: int | None
    ) -> None:
        """Add what one step of these moves sends; see `Strategy.predict`."""
        for bucket in layout.buckets:
            matrices = [index for index in bucket.params if index in muon]
            if not matrices:
                continue
            size = item_bytes or ITEM_BYTES[gather_dtype_name(layout.buffers[bucket.buffer_idx].grad_dtype)]
            ledger.record("all_gather", "dp", layout.dp, bucket.padded * size, momentum_label(bucket))
            for index in matrices:
                spec = layout.specs[index]
                if spec.tp_split_dim is not None and dp_rank in layout.owners(bucket, index):
                    ledger.record("all_gather", "tp", tp, spec.numel * tp * size, f"momentum, {spec.name}")

    @staticmethod
    def transient_bytes(
        layout: Layout, muon: frozenset[int], tp: int, dp_rank: int, item_bytes: int | None, compute_bytes: int
    ) -> int:
        """Return a bound of what one wave allocates, for the worst bucket; see `Strategy.transient_bytes`.

        w b                            the momentum's pieces
        + m (b + B)                    the shard, and the gathered bucket
        + (2 m + max(p + c, 5 c)) F    whole matrices, their batch (which becomes their update), Newton–Schulz's own
        + m L                          the copy that puts blocks cut along dimension 1 side by side

        in bytes, with B elements in the bucket (padded) and b = B / D in a shard; F in the whole matrices of which this
        rank owns a part, L in the largest of them; w, m, c bytes per element of the momentum, the gather and
        Newton–Schulz; p of the norm (float32 or wider). F <= T b + 2 L, for only the two matrices at the ends of a
        shard can stick out of it: the bound grows with the bucket and the largest matrix, never with the model.
        """
        worst = 0
        for bucket in layout.buckets:
            specs = [layout.specs[i] for i in bucket.params if i in muon and dp_rank in layout.owners(bucket, i)]
            whole = [math.prod(spec.full_shape(tp)) for spec in specs]
            if not any(i in muon for i in bucket.params):
                continue
            grad_dtype = layout.buffers[bucket.buffer_idx].grad_dtype
            w = ITEM_BYTES[grad_dtype]
            m = item_bytes or ITEM_BYTES[gather_dtype_name(grad_dtype)]
            matrices = whole_matrix_bytes(m, compute_bytes) * sum(whole) + m * max(whole, default=0)
            worst = max(worst, w * bucket.shard_size + m * (bucket.shard_size + bucket.padded) + matrices)
        return worst


def whole_matrix_bytes(gathered: int, compute: int) -> int:
    """Return a bound, per element, of what whole matrices take from their gather to their updates.

    2 m + max(p + c, 5 c), with m = `gathered` and c = `compute` bytes per element; see `GatherAll.transient_bytes`.
    """
    return 2 * gathered + max(max(gathered, 4) + compute, 5 * compute)


def momentum_label(bucket: Bucket) -> str:
    """Return what the ledger calls the DP gather of this bucket's momentum."""
    return f"momentum, {bucket.label}"


STRATEGY = GatherAll
