"""Optimizers with one small mistake each, which train, raise nothing, and look healthy: does the certificate notice?

`MUTANTS` names them. Each is made with the arguments of `DistributedMuon` and takes its place. Never train with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import scale
from distmuon.optim.strategies.gather_all import GatherAll
from distmuon.optim.strategies.strategy import BucketGroup, Strategy
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Bucket

Make = Callable[..., DistributedMuon]

# ---- Wrong numbers ----------------------------------------------------------------------------------------


def with_options(**wrong: Callable[[float], Any]) -> Make:
    """Return healthy Muon with other options: option -> what replaces the recipe's value."""

    def make(groups: Any, grid: Grid, **options: Any) -> DistributedMuon:
        return DistributedMuon(groups, grid, **options | {name: f(options.get(name, 0.0)) for name, f in wrong.items()})

    return make


class WithoutDivision(DistributedMuon):
    """Gradients are summed over DP and not averaged."""

    def reduce_scatter(self, bucket: Bucket) -> None:
        super().reduce_scatter(bucket)
        self.buffers.gradients_of(bucket)[1].mul_(self.grid.dp.size)


class LocalScale(DistributedMuon):
    """The update is scaled by the shape of the TP-local block instead of the whole matrix's."""

    def apply(self, buckets: BucketGroup, updates: Mapping[int, Tensor]) -> None:
        specs = self.buffers.layout.specs
        factors = {i: scale(specs[i].shape) / scale(specs[i].full_shape(self.grid.tp.size)) for i in updates}
        super().apply(buckets, {i: update.double() * factors[i] for i, update in updates.items()})


class DecayLast(DistributedMuon):
    """The weights decay after the update, which decays with them, instead of before."""

    def apply(self, buckets: BucketGroup, updates: Mapping[int, Tensor]) -> None:
        rates = {i: group["lr"] * group["weight_decay"] for i, group in enumerate(self.group_of)}
        super().apply(buckets, {i: update.double() * (1 - rates[i]) for i, update in updates.items()})


# ---- Wrong dtypes -----------------------------------------------------------------------------------------


class MomentumInBf16(DistributedMuon):
    """The momentum is kept in bf16."""

    def momentum(self, buckets: BucketGroup, wave: Collection[int] | None = None) -> dict[int, Tensor]:
        inputs = super().momentum(buckets, wave)
        for state in self.state.values():
            if "momentum_buffer" in state:
                state["momentum_buffer"].copy_(state["momentum_buffer"].bfloat16())
        return inputs


class AccumulatesInModelDtype(DistributedMuon):
    """Micro-batches are added up in the model's dtype."""

    def __init__(self, params: Any, grid: Grid, **options: Any) -> None:
        super().__init__(params, grid, **options)
        for parameter in self.buffers.parameters:
            parameter.register_post_accumulate_grad_hook(round_gradient)


def round_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data.copy_(parameter.grad.to(parameter.dtype))


class WithoutMasters(DistributedMuon):
    """A bf16 model keeps no float32 master weights: each step begins where the last one was rounded to."""

    def update(self) -> None:
        super().update()
        for bucket, master in self.buffers.masters.items():
            master.copy_(self.buffers.parameters_of(bucket)[1])


# ---- Wrong places -----------------------------------------------------------------------------------------


class LastMicroBatch(DistributedMuon):
    """A micro-batch's gradients replace those of the one before, instead of being added."""

    def __init__(self, params: Any, grid: Grid, **options: Any) -> None:
        super().__init__(params, grid, **options)
        for parameter in self.buffers.parameters:
            parameter.register_hook(partial(forget_gradient, parameter))  # type: ignore[no-untyped-call]


def forget_gradient(parameter: Tensor, new: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.data.zero_()


class StaleRank(DistributedMuon):
    """The last DP rank sees the others' new parameters one step late: never, that is, since they move on."""

    def all_gather(self, bucket: Bucket) -> None:
        whole, shard = self.buffers.parameters_of(bucket)
        before = whole.clone()
        super().all_gather(bucket)
        if self.grid.dp.rank == self.grid.dp.size - 1:
            mine = shard.clone()
            whole.copy_(before)
            shard.copy_(mine)


class OwnBlocks(GatherAll):
    """Every TP rank orthogonalizes its own block."""

    def tp_gather(self, buckets: BucketGroup, blocks: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {index: block.clone() for index, block in blocks.items()}

    def tp_shard(self, buckets: BucketGroup, updates: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return dict(updates)


class WrongPiece(GatherAll):
    """The gathered pieces of momentum stand in the wrong ranks' places."""

    def unpack(self, bucket: Bucket, gathered: Tensor, indices: Collection[int]) -> dict[int, Tensor]:
        return super().unpack(bucket, gathered.roll(bucket.shard_size), indices)


def moving_by(strategy: type[Strategy]) -> Make:
    """Return Muon with other moves."""

    def make(groups: Any, grid: Grid, **options: Any) -> DistributedMuon:
        optimizer = DistributedMuon(groups, grid, **options)
        optimizer.strategy = strategy(optimizer.strategy.context)
        return optimizer

    return make


MUTANTS: dict[str, Make] = {
    "no weight decay": with_options(weight_decay=lambda decay: 0.0),
    "weight decay doubled": with_options(weight_decay=lambda decay: 2 * decay),
    "weight decay after the update": DecayLast,
    "learning rate 5 % higher": with_options(lr=lambda lr: 1.05 * lr),
    "no Nesterov": with_options(nesterov=lambda _: False),
    "momentum 0.94 for 0.95": with_options(momentum=lambda _: 0.94),
    "AdamW's eps 1e-6 for 1e-8": with_options(eps=lambda _: 1e-6),
    "four Newton–Schulz steps for five": with_options(ns_steps=lambda _: 4),
    "scale of the local shape": LocalScale,
    "gradients not divided by D": WithoutDivision,
    "momentum kept in bf16": MomentumInBf16,
    "no master weights": WithoutMasters,
    "accumulation in the model's dtype": AccumulatesInModelDtype,
    "last micro-batch alone": LastMicroBatch,
    "another rank's momentum": moving_by(WrongPiece),
    "Newton–Schulz on blocks": moving_by(OwnBlocks),
    "stale parameters on one rank": StaleRank,
}
