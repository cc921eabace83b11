"""Muon in blocks, in one process: what `blockwise` and `periodic` are where T is more than 1. Other optimizers.

A certificate holds a sharded run of those strategies against this: plain single-device code, whole parameters, no map,
no shard, no group. What TP would hold in T pieces is orthogonalized in T pieces, each by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distmuon.optim.batches import batches
from distmuon.optim.masters import rounded_once
from distmuon.optim.muon import Muon, WeightPart, decay_and_apply_, orthogonalize, scale
from distmuon.optim.strategies.strategy import refuse_row_moments
from distmuon.sharding.tensor_parallel import tp_split_dim


class BlockMuon(Muon):
    """Muon whose matrices are orthogonalized in blocks, cut along the dimension that their mark `tp_split_dim` names.

    Takes what `Muon` takes, and as options of each group
    blocks: T, into how many equal blocks a marked matrix is cut; what bears no mark, or None, is whole in every step.
    whole_every: every so many steps, all matrices are whole; 0: never.
    block_lr_ratio: learning rate of a block step over that of a whole one; "shape": let the update's factor be that of
        the block's shape. Decay is not scaled.

    Raises ValueError, beyond what Muon refuses, where T does not divide a matrix. It counts its steps by itself, and
    does not save their number.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        blocks: int = 1,
        whole_every: int = 0,
        block_lr_ratio: float | str = "shape",
        **options: Any,
    ) -> None:
        own = {"blocks": blocks, "whole_every": whole_every, "block_lr_ratio": block_lr_ratio}
        self.DEFAULTS = Muon.DEFAULTS | own  # torch fills groups up from these
        super().__init__(params, lr, **options)
        self.number = 1  # of the present step
        self.register_step_post_hook(_count)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        refuse_row_moments(group, "blockwise")
        for p in group["params"]:
            dim = tp_split_dim(p)
            if dim is not None and p.shape[dim] % group["blocks"]:
                raise ValueError(
                    f"{group['blocks']} blocks do not divide dimension {dim} of a matrix of {tuple(p.shape)}; "
                    "choose a number that does."
                )

    def _move(self, parameters: list[Tensor], groups: list[dict[str, Any]]) -> None:
        """Update the matrices of one batch, each in as many blocks as this step asks for."""
        fed = self._momentum(parameters, groups)
        cut = [self._cut(p, u, group) for p, u, group in zip(parameters, fed, groups, strict=True)]
        blocks = [block for pieces in cut for block in pieces]
        owners = [group for pieces, group in zip(cut, groups, strict=True) for _ in pieces]
        for batch in batches(blocks, owners):
            results = orthogonalize([blocks[i] for i in batch], owners[batch[0]])
            for i, update in zip(batch, results, strict=True):
                blocks[i] = update
        remaining = iter(blocks)
        for p, group, pieces in zip(parameters, groups, cut, strict=True):
            updates = [next(remaining) for _ in pieces]  # O[I_tp, J] or O[I, J_tp], T of them
            update = torch.cat(updates, tp_split_dim(p) or 0) if len(pieces) > 1 else updates[0]
            ratio = _ratio(p, group) if len(pieces) > 1 else 1.0
            with rounded_once(p, self.master(p)) as weight:
                part = WeightPart(weight, update, group["lr"] * ratio, scale(p.shape, group["scale"]))
                decay_and_apply_([weight], [group], [[part]])

    def _cut(
        self,
        p: Tensor,  # [A, B]
        u: Tensor,  # [A, B]
        group: dict[str, Any],
    ) -> list[Tensor]:
        """Return what Newton–Schulz is fed for one matrix in this step, in storage of its own."""
        dim, every = tp_split_dim(p), group["whole_every"]
        if dim is None or group["blocks"] == 1 or (every and self.number % every == 0):
            return [u]
        return [block.clone(memory_format=torch.contiguous_format) for block in u.chunk(group["blocks"], dim)]


def _count(optimizer: Any, *_: Any) -> None:
    optimizer.number += 1


def _ratio(p: Tensor, group: dict[str, Any]) -> float:
    """Return learning rate of a block step over that of a whole one."""
    if group["block_lr_ratio"] != "shape":
        return group["block_lr_ratio"]
    dim = tp_split_dim(p)
    block = [size // group["blocks"] if dim == d else size for d, size in enumerate(p.shape)]
    return scale(block, group["scale"]) / scale(p.shape, group["scale"])


def block_options(strategy: str, group: Mapping[str, Any], tp: int) -> dict[str, Any] | None:
    """Return the options that make `BlockMuon` of a group over T = `tp` by this strategy; None where it is Muon."""
    if tp > 1 and strategy == "blockwise":
        return {"blocks": tp, "whole_every": 0, "block_lr_ratio": 1.0}
    if tp > 1 and strategy == "periodic" and group["whole_every"] > 1:
        return {"blocks": tp} | {name: group[name] for name in ("whole_every", "block_lr_ratio")}
    return None
