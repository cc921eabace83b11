"""What a strategy's five moves send, hold and orthogonalize, before any process exists: from the map alone.

Every strategy says it of itself, in its own file, at its end: `COSTS = StrategyCosts(sends, allocates, tasks)`.
`verify.prediction` adds what all steps have in common, and tests hold it against ledgers and allocators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from distmuon.optim.fast_paths import BATCH, BATCHED_ON_GPU
from distmuon.optim.newton_schulz import flops
from distmuon.sharding.layout import ITEM_BYTES, Bucket, Layout, ParamSpec
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.matrices import MatrixBlock
from distmuon.sharding.precision import default_gather_dtype


class Task(NamedTuple):
    """One parameter in the hands of some ranks.

    parameter: its place in the map. parts: the matrices that each of them orthogonalizes: whole ones, or blocks.
    ranks: (dp, tp) of each.
    """

    parameter: int
    parts: Sequence[MatrixBlock]
    ranks: Sequence[tuple[int, int]]

    @property
    def flops(self) -> int:
        """What it costs each of the ranks."""
        return work(self.parts)


@dataclass(frozen=True)
class PlannedRank:
    """One rank of a strategy's layout, and how Newton–Schulz is to be fed there: what its costs are asked for.

    layout: the strategy's own map; its `dp` is D. muon: indices of the Muon parameters. tp: T.
    item_bytes: per element of the gather dtype; None: the default, per buffer. compute_bytes: of the compute dtype.
    whole: of a strategy whose steps are not all alike, the matrices that are whole in this step; None: all.
    """

    layout: Layout
    muon: frozenset[int]
    tp: int = 1
    dp_rank: int = 0
    tp_rank: int = 0
    item_bytes: int | None = None
    compute_bytes: int = 4
    whole: frozenset[int] | None = None

    def owned(self, bucket: Bucket) -> list[int]:
        """Return the matrices of Muon's in this bucket of which the rank owns a piece."""
        return [index for index in self.layout.owned(bucket, self.dp_rank) if index in self.muon]

    def momentum_bytes(self, bucket: Bucket) -> tuple[int, int]:
        """Return bytes per element of the bucket's momentum as it is kept, and as it is gathered."""
        grad_dtype = self.layout.buffers[bucket.buffer_idx].grad_dtype
        gathered = self.item_bytes or default_gather_dtype(getattr(torch, grad_dtype)).itemsize
        return ITEM_BYTES[grad_dtype], gathered

    def gather_over_tp(self, ledger: Ledger, bucket: Bucket) -> None:
        """Add to the ledger the TP gather of every cut matrix of which the rank owns a piece."""
        _, size = self.momentum_bytes(bucket)
        for spec in (self.layout.specs[index] for index in self.owned(bucket)):
            if spec.tp_gather_dim is not None:
                ledger.record("all_gather", "tp", self.tp, spec.numel * self.tp * size, f"momentum, {spec.name}")


class StrategyCosts(NamedTuple):
    """What a strategy's moves, between momentum and apply, send, allocate and orthogonalize, from the map alone.

    sends: adds what the rank sends in one step to the ledger, collective by collective, labelled "<what>, <of which
        bucket or parameter>"; over DP and TP.
    allocates: an upper bound of the bytes that the moves of one bucket group, or of one wave of it, allocate on a rank
        beyond state, parameters and gradients.
    in_waves: whether a bucket group may take several.
    tasks: (layout, muon, tp) -> every rank's work, in one sweep over the map; None: not known.
    others: where steps are not all alike, the other steps of a period, as (how many, what they cost).
    """

    sends: Callable[[Ledger, PlannedRank], None]
    allocates: Callable[[PlannedRank], int]
    tasks: Callable[[Layout, Collection[int], int], Iterator[Task]] | None = None
    in_waves: bool = False
    others: Sequence[tuple[int, StrategyCosts]] = ()


# ---- Work -------------------------------------------------------------------------------------------------


def by_all_owners(layout: Layout, muon: Collection[int], tp: int) -> Iterator[Task]:
    """Yield all parameters, each at all DP ranks that own a piece of it, and at all their TP ranks."""
    for bucket in layout.buckets:
        for index in bucket.params:
            if index in muon:
                rows = layout.owners(bucket, index)
                yield Task(index, layout.specs[index].seen_parts(tp), [(d, t) for d in rows for t in range(tp)])


def work(matrices: Iterable[MatrixBlock]) -> int:
    """Return what orthogonalizing all of these costs, in FLOPs."""
    return sum(same.number * flops(same.shape) for same in matrices)


# ---- Memory -----------------------------------------------------------------------------------------------


class WholeMatrices(NamedTuple):
    """Elements of the parameters that a rank orthogonalizes in one round, their matrices whole.

    total: of all of them (where TP cuts between matrices: of its own). largest: of the largest. small: of those whose
    matrices are no larger than a device takes in a batch (a GPU, which takes larger ones than a CPU does), together.
    several: of those that hold several matrices each, together.
    """

    total: int = 0
    largest: int = 0
    small: int = 0
    several: int = 0

    @classmethod
    def of(cls, specs: Iterable[ParamSpec], tp: int, blocks: bool = False) -> WholeMatrices:
        """Return the sizes of these parameters' whole matrices, or of their TP-local `blocks`."""
        total = cls()
        for spec in specs:
            total = total.plus(cls.of_one(spec, tp, blocks))
        return total

    @classmethod
    @cache  # asked of the same parameter for every rank
    def of_one(cls, spec: ParamSpec, tp: int, blocks: bool = False) -> WholeMatrices:
        """Return the same of one parameter."""
        local = blocks or spec.tp_local_matrices
        size = spec.numel if local else math.prod(spec.full_shape(tp))
        parts = spec.local_parts if blocks else spec.seen_parts(tp)
        small = all(math.prod(part.shape) <= BATCHED_ON_GPU for part in parts)
        return cls(size, size, size * small, size * (spec.matrices != "whole"))

    def plus(self, other: WholeMatrices) -> WholeMatrices:
        """Return the sizes of both together."""
        largest = max(self.largest, other.largest)
        return WholeMatrices(self.total + other.total, largest, self.small + other.small, self.several + other.several)

    def bytes(self, gathered: int, compute: int) -> int:
        """Return a bound of the bytes that they take from their gather to their updates.

            m F                         whole matrices; a large one is overwritten by its update
            + m S                       batches of small ones, which become their updates
            + max(p + c, 5 c) E         Newton–Schulz's own: it takes one batch, or one large matrix, after the other
            + 2 m min(E, P)             several matrices, copied out of the parameters that hold them

        with F = `total`, L = `largest`, S = `small`, P = `several` and E = max(L, min(S, BATCH)), which is what a batch
        holds at most; m = `gathered` and c = `compute` bytes per element, p of the norm (float32 or wider).
        """
        at_once = max(self.largest, min(self.small, BATCH))
        copies = self.total + self.small + 2 * min(at_once, self.several)
        return gathered * copies + iteration_bytes(gathered, compute) * at_once


def iteration_bytes(gathered: int, compute: int) -> int:
    """Return a bound, per element, of what Newton–Schulz allocates: max(p + c, 5 c), as in `WholeMatrices.bytes`."""
    return max(max(gathered, 4) + compute, 5 * compute)
