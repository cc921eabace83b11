"""blockwise: every rank orthogonalizes the block that it holds, and sends nothing for it. Another optimizer than Muon.

Over DP as in `owner`: no shard boundary cuts a TP-local matrix. Over TP nothing happens at all: a matrix that is cut
over TP ranks is orthogonalized in that many blocks, each by itself, so the update depends on T. Megatron-LM did so by
default (`muon_tp_mode="blockwise"`) until 21 August 2026, when `duplicated` took its place (commit bb47df5416); NeMo's
Megatron-Bridge 0.5.0 still sets it. Where T is 1, it is Muon.

    dp_gather       this rank's pieces, which are whole   ->  TP-local matrices        nothing sent
    tp_gather       TP-local matrices                     ->  the same                 nothing sent
    newton_schulz   blocks                                ->  their updates            not Muon's
    tp_shard        their updates                         ->  the same                 nothing sent
    dp_shard        their updates                         ->  this rank's pieces       nothing sent
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distmuon.optim.strategies import owner
from distmuon.optim.strategies.costs import PlannedRank, StrategyCosts, Task, by_all_owners
from distmuon.optim.strategies.owner import OneOwner
from distmuon.optim.strategies.strategy import refuse_row_moments
from distmuon.sharding.layout import Layout, ParamSpec


class BlockOwner(OneOwner):
    """One owner per TP-local matrix, which takes it for a whole one."""

    @staticmethod
    def options(given: Mapping[str, Any]) -> dict[str, Any]:
        """Return none; ValueError for what blocks cannot have."""
        refuse_row_moments(given, "blockwise")
        return {}

    @staticmethod
    def plan(specs: Sequence[ParamSpec], muon: Collection[int], dp: int, tp: int, bucket_size: int) -> Layout:
        """Return a map whose shards cut no TP-local matrix, balanced by the work on them as they are."""
        return OneOwner.plan(specs, muon, dp, 1, bucket_size)

    def owns_full(self, index: int) -> bool:
        """Never."""
        return False


# ---- What it costs ----------------------------------------------------------------------------------------


def sends(*_: Any) -> None:
    """Add nothing: no move between momentum and apply sends."""


def allocates(at: PlannedRank) -> int:
    """Return owner's bound for T = 1: a block is taken for a whole matrix."""
    return owner.allocates(replace(at, tp=1))


def by_blocks(layout: Layout, muon: Collection[int], tp: int) -> Iterator[Task]:
    """Yield the TP-local blocks, each at its own rank of the row that owns it."""
    for task in by_all_owners(layout, muon, tp):
        spec = layout.specs[task.parameter]
        yield task._replace(parts=spec.local_parts)


STRATEGY = BlockOwner
COSTS = StrategyCosts(sends, allocates, by_blocks)
