"""ZeRO-1: gradients and optimizer state live as 1/D shards of flat buffers; AdamW on them is the baseline.

One step, for every bucket: reduce-scatter the gradients (each DP rank gets the mean of its shard), update the shard's
fp32 master weights, all-gather the parameters. Together the two collectives move what data parallelism's single
all-reduce moves, and the optimizer's state is D times smaller. Source: ZeRO (Rajbhandari et al. 2020, section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Bucket, DistMeta, Layout, ParamSpec, plan


def dtype_name(dtype: torch.dtype) -> str:
    """Return the layout's name of a torch dtype: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def specs_of(named_parameters: Sequence[tuple[str, Tensor]]) -> list[ParamSpec]:
    """Return what the layout needs to know; a tensor-parallel layer has left `tp_split_dim` on its parameters."""
    return [
        ParamSpec(name, tuple(p.shape), dtype_name(p.dtype), getattr(p, "tp_split_dim", None))
        for name, p in named_parameters
    ]


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank owns, as flat views [meta.local_range.size].

    weight: of the master weights, float32 or wider. gradient: of the reduced gradients, same dtype.
    """

    index: int
    meta: DistMeta
    weight: Tensor
    gradient: Tensor


class ShardedBuffers:
    """The flat storages of one rank, laid out by the virtual map.

    Parameters become views of one flat storage per buffer, so that the last all-gather writes them in place.
    Gradients are accumulated in float32 (or wider) in a second one, as soon as autograd has produced them: a bf16
    model sums its micro-batches in float32 and keeps no bf16 copy. Master weights are this rank's shard in float32;
    where the model is in that dtype already they *are* the rank's part of the parameters and cost nothing.

    named_parameters: TP-local, in the order of the map.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], grid: Grid, bucket_size: int) -> None:
        self.grid = grid
        self.names = [name for name, _ in named_parameters]
        self.parameters = [p for _, p in named_parameters]
        self.layout: Layout = plan(specs_of(named_parameters), grid.dp.size, bucket_size)
        self.metas = self.layout.view(grid.dp.rank)
        self.flat_parameters = [self._storage(b.size, b.param_dtype) for b in self.layout.buffers]
        self.flat_gradients = [self._storage(b.size, b.grad_dtype) for b in self.layout.buffers]
        for p, meta in zip(self.parameters, self.metas, strict=True):
            home = self.flat_parameters[meta.buffer_idx][meta.global_range.as_slice].view(meta.shape)
            p.data = home.copy_(p.data)
        self.masters = {bucket: self._master(bucket) for bucket in self.layout.buckets}
        self.pieces = {bucket: self._pieces(bucket) for bucket in self.layout.buckets}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.layout.buckets

    def reduce_scatter(self, bucket: Bucket) -> None:
        """Replace this rank's shard of the bucket's gradients by their mean over the DP group."""
        gradients = self.flat_gradients[bucket.buffer_idx]
        shard = gradients[bucket.shard(self.grid.dp.rank).as_slice]
        self.grid.dp.reduce_scatter(gradients[bucket.range.as_slice], shard, f"gradients, {bucket.label}")
        if self.grid.dp.size > 1:
            shard.div_(self.grid.dp.size)

    def all_gather(self, bucket: Bucket) -> None:
        """Fill the bucket's parameters, in the model's dtype, with every DP rank's master weights."""
        parameters = self.flat_parameters[bucket.buffer_idx]
        shard = parameters[bucket.shard(self.grid.dp.rank).as_slice]
        if self.masters[bucket].dtype != shard.dtype:
            shard.copy_(self.masters[bucket])
        self.grid.dp.all_gather(shard, f"parameters, {bucket.label}", out=parameters[bucket.range.as_slice])

    def refresh_masters(self) -> None:
        """Copy the model's parameters into the master weights, after something else has changed the model."""
        for bucket in self.buckets:
            self.masters[bucket].copy_(self._shard_of_parameters(bucket))

    def gradient_of(self, index: int) -> Tensor:
        """Return the whole, unreduced gradient of parameter `index` as this rank has accumulated it: TP-local shape."""
        meta = self.metas[index]
        return self.flat_gradients[meta.buffer_idx][meta.global_range.as_slice].view(meta.shape)

    def zero_gradients(self) -> None:
        for flat in self.flat_gradients:
            flat.zero_()

    def _storage(self, size: int, dtype: str) -> Tensor:
        return torch.zeros(size, dtype=getattr(torch, dtype), device=self.grid.device)

    def _shard_of_parameters(self, bucket: Bucket) -> Tensor:
        return self.flat_parameters[bucket.buffer_idx][bucket.shard(self.grid.dp.rank).as_slice]

    def _master(self, bucket: Bucket) -> Tensor:
        dtype = getattr(torch, self.layout.buffers[bucket.buffer_idx].grad_dtype)
        return self._shard_of_parameters(bucket).to(dtype)  # the same tensor where the dtype is the same

    def _pieces(self, bucket: Bucket) -> list[Piece]:
        shard = bucket.shard(self.grid.dp.rank)
        pieces = []
        for index in bucket.params:
            meta = self.metas[index]
            if meta.owned:
                weight = self.masters[bucket][meta.local_range.relative_to(shard.start).as_slice]
                gradient = self.flat_gradients[bucket.buffer_idx][meta.local_range.as_slice]
                pieces.append(Piece(index, meta, weight, gradient))
        return pieces
