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
    """The part of one parameter that this rank owns: flat views, n = meta.local_range.size elements long.

    index: the parameter's place in the map.
    """

    index: int
    meta: DistMeta
    weight: Tensor  # [n] of the master weights, float32 or wider
    gradient: Tensor  # [n] of the reduced gradients, same dtype


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
        self.flat_parameters = [self._storage(b.size, b.param_dtype) for b in self.layout.buffers]  # each [size]
        self.flat_gradients = [self._storage(b.size, b.grad_dtype) for b in self.layout.buffers]  # each [size]
        for p, meta in zip(self.parameters, self.metas, strict=True):
            home = self.flat_parameters[meta.buffer_idx][meta.global_range.as_slice].view(meta.shape)
            p.data = home.copy_(p.data)
        self.masters = {bucket: self._master(bucket) for bucket in self.layout.buckets}  # each [shard_size]
        self.pieces = {bucket: self._pieces(bucket) for bucket in self.layout.buckets}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.layout.buckets

    def gradients_of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return the bucket's flat gradients [padded], and the view of them that is this rank's shard [shard_size]."""
        return self._whole_and_shard(self.flat_gradients, bucket)

    def parameters_of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return the bucket's flat parameters [padded], and the view of them that is this rank's shard [shard_size]."""
        return self._whole_and_shard(self.flat_parameters, bucket)

    def refresh_masters(self) -> None:
        """Copy the model's parameters into the master weights, after something else has changed the model."""
        for bucket in self.buckets:
            self.masters[bucket].copy_(self.parameters_of(bucket)[1])

    def gradient_of(self, index: int) -> Tensor:  # G[I_tp, J]{U_dp}
        """Return the whole, unreduced gradient of parameter `index` as this rank has accumulated it."""
        meta = self.metas[index]
        return self.flat_gradients[meta.buffer_idx][meta.global_range.as_slice].view(meta.shape)

    def zero_gradients(self) -> None:
        for flat in self.flat_gradients:
            flat.zero_()

    def _storage(self, size: int, dtype: str) -> Tensor:
        return torch.zeros(size, dtype=getattr(torch, dtype), device=self.grid.device)

    def _whole_and_shard(self, storages: list[Tensor], bucket: Bucket) -> tuple[Tensor, Tensor]:
        flat = storages[bucket.buffer_idx]
        return flat[bucket.range.as_slice], flat[bucket.shard(self.grid.dp.rank).as_slice]

    def _master(self, bucket: Bucket) -> Tensor:
        dtype = getattr(torch, self.layout.buffers[bucket.buffer_idx].grad_dtype)
        return self.parameters_of(bucket)[1].to(dtype)  # the same tensor where the dtype is the same

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
