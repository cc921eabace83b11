"""Deliberately broken variants: the exhibits of chapter 11. Never train with them.

Each exhibit is the real code with exactly one thing wrong. `broken(name, params, grid)` hangs it in the place of
`DistributedMuon`. "Seen" says whose bug it is and how far we know it: *run* means that we ran that code and saw it,
*read* means that we only read it there, *reported* that its own project describes it. What each one shows is in the
chapter, and tests/book/ch11/test_museum.py checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import apply_, decay_, scale
from distmuon.optim.strategies.gather_all import GatherAll
from distmuon.optim.strategies.strategy import BucketGroup, Tensors
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Bucket, Layout, ParamSpec

Closure = Callable[[], float] | None

# ---- Bookkeeping: the right arithmetic on the wrong elements ----------------------------------------------


class StaleGroupParameters(DistributedMuon):
    """The second loop over parameter groups uses `params` left over from the first: always the last group's.

    Seen: Moonlight's proof of concept (Megatron-LM PR #1428, commit f432fbe, "Bug 1"; run). Review found it, and commit
    8aee20b fixed it the same day. Its own test has one group and passes bitwise.
    """

    def apply(self, buckets: BucketGroup, updates: Mapping[int, Tensor]) -> None:
        groups = [group for group in self.param_groups if group["algorithm"] == "muon"]
        for group in groups:  # in the original this loop updates the momentum
            params = {id(p) for p in group["params"]}
        for group in groups:  # and here `params = group["params"]` is missing
            for piece in self._moving(buckets, updates):
                if id(self.buffers.parameters[piece.index]) in params:
                    spec, lr = self.buffers.layout.specs[piece.index], group["lr"]
                    whole = spec.full_shape(self.grid.tp.size)
                    decay_([piece.weight], lr, group["weight_decay"])
                    update = updates[piece.index]
                    apply_([piece.weight], [update], lr, scale(whole, group["scale"]))


class OneDimensionalView(GatherAll):
    """Matrices leave the gathered bucket as `.view(-1)` instead of `.view(shape)`.

    Seen: "Bug 2" of the tutorials, a commented-out line in a later refactor (read); never in Moonlight's own code.
    """

    def unpack(
        self,
        bucket: Bucket,
        gathered: Tensor,
        indices: Collection[int],
    ) -> dict[int, Tensor]:
        blocks = super().unpack(bucket, gathered, indices)
        return {index: block.view(-1) for index, block in blocks.items()}


class MissingPadding(DistributedMuon):
    """Buckets are not padded to a multiple of D before they are cut into D shards.

    Seen: nowhere in public that we know of, but the proof of concept's own test never needs padding (read).
    """

    def plan(self, specs: Sequence[ParamSpec], dp: int, bucket_size: int) -> Layout:
        return without_padding(super().plan(specs, dp, bucket_size))


def without_padding(layout: Layout) -> Layout:
    """Return the map with every bucket as long as its parameters."""
    buffers = []
    for buffer in layout.buffers:
        buckets, offset = [], 0
        for bucket in buffer.buckets:
            buckets.append(replace(bucket, offset=offset, padded=bucket.numel))
            offset += bucket.numel
        buffers.append(replace(buffer, buckets=tuple(buckets)))
    return replace(layout, buffers=tuple(buffers))


# ---- Gathers: Newton–Schulz sees something that is not the matrix -----------------------------------------


class WrongTPDimension(GatherAll):
    """TP blocks are put together along the dimension that was not cut.

    Seen: nowhere in public that we know of; you write it if you take weights for [in, out] while torch has [out, in].
    """

    def tp_gather(self, buckets: BucketGroup, blocks: Tensors) -> dict[int, Tensor]:
        matrices = dict(blocks)
        for index, block in blocks.items():
            spec = self.context.layout.specs[index]
            if spec.tp_split_dim is not None:
                other, label = 1 - spec.tp_split_dim, f"momentum, {spec.name}"
                gather = self.context.grid.tp.all_gather_blocks
                matrices[index] = gather(block, other, label)
        return matrices


class BlockWise(GatherAll):
    """Every TP rank orthogonalizes its own block, as if it were the matrix.

    Seen: Megatron-LM PR #1428, whose integration inverts the condition, so that its TP gather never runs (read).
    """

    def tp_gather(self, buckets: BucketGroup, blocks: Tensors) -> dict[int, Tensor]:
        return dict(blocks)

    def tp_shard(self, buckets: BucketGroup, updates: Tensors) -> dict[int, Tensor]:
        return dict(updates)


class OwnedPieceOnly(GatherAll):
    """A matrix that straddles a shard boundary is orthogonalized from this rank's piece alone.

    The rest is zeros.
    Seen: DeepSpeed #7807, ZeRO-1 and 2 with reduce-scatter (reported; there the rest was this
    rank's own unreduced gradient); refused since #8090, repaired in #8141.
    """

    def dp_gather(self, buckets: BucketGroup, momentum: Tensors) -> dict[int, Tensor]:
        (bucket,) = buckets
        shard = self.pack(bucket, momentum)
        alone = shard.new_zeros(bucket.padded)
        mine = bucket.shard(self.context.grid.dp.rank).relative_to(bucket.offset)
        alone[mine.as_slice] = shard
        return self.unpack(bucket, alone, momentum.keys())


class SkipsWhenEmpty(GatherAll):
    """A rank that owns nothing for Muon in a bucket does not come to its gather.

    Seen: nowhere in public that we know of. Akin to dion #74 (reported; mended): there all ranks
    came, but with empty shards they disagreed about sizes, and waited.
    """

    def dp_gather(self, buckets: BucketGroup, momentum: Tensors) -> dict[int, Tensor]:
        return super().dp_gather(buckets, momentum) if momentum else {}


class GradientInsteadOfMomentum(DistributedMuon):
    """The gradient is gathered and orthogonalized; momentum is kept up to date, and never used.

    Seen: a reading of the paper's Algorithm 1, whose line 6 calls the gathered tensor G. Jen Wei worked out what must
    be meant, and proposed a clearer letter (Moonlight #38).
    """

    def momentum(self, buckets: BucketGroup, wave: Collection[int] | None = None) -> dict[int, Tensor]:
        super().momentum(buckets, wave)
        return {piece.index: piece.gradient for piece in self._moving(buckets, wave)}


# ---- Newton–Schulz: the wrong number of times, or on rounded numbers --------------------------------------


class NoNewtonSchulz(GatherAll):
    """The momentum itself is the update.

    Seen: DeepSpeed #8441, at ZeRO stage 0, the default (reported; mended in #8442): there "Muon" was plain gradient
    descent. Here momentum stays.
    """

    def newton_schulz(self, matrices: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return dict(matrices)


class CastBeforeNormalizing(GatherAll):
    """What Newton–Schulz is fed passes through fp16 before it is normalized.

    Seen: DeepSpeed #8533, in the Gram form (reported; mended there): a loss scale of 1e4 was enough.
    """

    def newton_schulz(self, matrices: Mapping[int, Tensor]) -> dict[int, Tensor]:
        cast = {index: m.to(torch.float16).to(m.dtype) for index, m in matrices.items()}
        return super().newton_schulz(cast)


class OncePerMicroBatch(DistributedMuon):
    """Every micro-batch gets a step: momentum advances, and partial gradients are orthogonalized.

    Seen: DeepSpeed #8443, ZeRO-3 (reported), whose gradient reduction ran Muon; #8600 proposes
    the repair.
    """

    def __init__(self, params: Any, grid: Grid, **options: Any) -> None:
        super().__init__(params, grid, **options)
        self.micro_batches: list[dict[Tensor, Tensor]] = []
        for parameter in self.buffers.parameters:
            parameter.register_post_accumulate_grad_hook(self.keep_apart)

    def keep_apart(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if not self.micro_batches or parameter in self.micro_batches[-1]:
            self.micro_batches.append({})  # this parameter comes again: a new micro-batch
        self.micro_batches[-1][parameter] = parameter.grad.clone()
        parameter.grad = None

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        micro_batches, self.micro_batches = self.micro_batches, []
        for gradients in micro_batches:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            super().step()
        return loss


# ---- The catalogue ----------------------------------------------------------------------------------------

EXHIBITS: dict[str, type[DistributedMuon] | type[GatherAll]] = {
    "stale group parameters": StaleGroupParameters,
    "1-D view": OneDimensionalView,
    "missing padding": MissingPadding,
    "wrong tp dim": WrongTPDimension,
    "block-wise Newton–Schulz": BlockWise,
    "owned piece only": OwnedPieceOnly,
    "empty shard": SkipsWhenEmpty,
    "gradient, not momentum": GradientInsteadOfMomentum,
    "no Newton–Schulz": NoNewtonSchulz,
    "cast before normalizing": CastBeforeNormalizing,
    "once per micro-batch": OncePerMicroBatch,
}


def broken(name: str, params: Any, grid: Grid, **options: Any) -> DistributedMuon:
    """Return distributed Muon with exhibit `name` in it; arguments as for `DistributedMuon`."""
    exhibit = EXHIBITS[name]
    if issubclass(exhibit, DistributedMuon):
        return exhibit(params, grid, **options)
    optimizer = DistributedMuon(params, grid, **options)
    optimizer.strategy = exhibit(optimizer.strategy.context)  # type: ignore[attr-defined]
    return optimizer
