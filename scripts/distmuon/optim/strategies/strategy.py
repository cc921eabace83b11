"""What a strategy is: a way to let Newton–Schulz see whole matrices.

A strategy owns the five moves between momentum and update, mirror images around the mathematics:

    dp_gather    {index: this rank's piece}      -> {index: TP-local matrix}
    tp_gather    {index: TP-local matrix}        -> {index: whole matrix}
    newton_schulz
    tp_shard     {index: whole update}           -> {index: TP-local update}
    dp_shard     {index: TP-local update}        -> {index: this rank's piece}

`index` is the parameter's place in the map. A *wave* is what travels together: the buckets of one round of moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from distmuon.optim.muon import batches, orthogonalize
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Bucket, DistMeta, Layout
from distmuon.sharding.ledger import Ledger

Wave = tuple[Bucket, ...]


@dataclass(frozen=True)
class Task:
    """What every strategy is given.

    layout, metas: the map, and this rank's view of it. grid: for the collectives.
    groups: the Muon parameters: index -> parameter group.
    gather_dtype: in which the momentum travels and Newton–Schulz sees it; None: bf16, float64 for float64 models.
    compute_dtype, batched: see `muon.orthogonalize` and `muon.batches`.
    """

    layout: Layout
    metas: Sequence[DistMeta]
    grid: Grid
    groups: Mapping[int, dict[str, Any]]
    gather_dtype: torch.dtype | None
    compute_dtype: torch.dtype | str
    batched: bool

    def orthogonalize(self, matrices: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Run Newton–Schulz on whole matrices; the same for every strategy that holds them whole."""
        indices, updates = list(matrices), {}
        groups = [self.groups[index] for index in indices]
        for batch in batches(list(matrices.values()), groups, self.batched):
            inputs = [matrices[indices[i]] for i in batch]
            found = orthogonalize(inputs, groups[batch[0]], self.compute_dtype)
            updates.update({indices[i]: update for i, update in zip(batch, found, strict=True)})
        return updates


class Strategy(Protocol):
    """The five moves, and the rounds in which they are made.

    GATHERS_UNREAD: dp_gather makes views of what it gathers and reads none of it, so that the gather need only have
    been started (see `pipelining`).
    """

    GATHERS_UNREAD: ClassVar[bool]

    def __init__(self, task: Task) -> None: ...
    def waves(self) -> Sequence[Wave]: ...
    def dp_gather(self, wave: Wave, momentum: Mapping[int, Tensor]) -> dict[int, Tensor]: ...
    def tp_gather(self, wave: Wave, blocks: Mapping[int, Tensor]) -> dict[int, Tensor]: ...
    def newton_schulz(self, matrices: Mapping[int, Tensor]) -> dict[int, Tensor]: ...
    def tp_shard(self, wave: Wave, updates: Mapping[int, Tensor]) -> dict[int, Tensor]: ...
    def dp_shard(self, wave: Wave, blocks: Mapping[int, Tensor]) -> dict[int, Tensor]: ...

    @staticmethod
    def predict(
        ledger: Ledger, layout: Layout, muon: frozenset[int], tp: int, dp_rank: int, item_bytes: int | None
    ) -> None:
        """Add to `ledger` what DP rank `dp_rank` sends between momentum and update in one step.

        muon: indices of the Muon parameters. item_bytes: of the gather dtype; None: the default, per buffer.
        """

    @staticmethod
    def transient_bytes(
        layout: Layout, muon: frozenset[int], tp: int, dp_rank: int, item_bytes: int | None, compute_bytes: int
    ) -> int:
        """Return an upper bound of the bytes that one wave's moves allocate beyond state, parameters and gradients.

        compute_bytes: per element of Newton–Schulz's compute dtype; the rest as in `predict`.
        """
        ...


def gather_dtype_name(grad_dtype: str) -> str:
    """Return the default dtype in which momentum travels: bf16 (the paper), or float64 for float64 models."""
    return "float64" if grad_dtype == "float64" else "bfloat16"
