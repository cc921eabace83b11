"""What whole matrices take from their gather to their updates: a bound, from their sizes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from distmuon.optim.newton_schulz import BATCH, BATCHED_ON_GPU
from distmuon.sharding.layout import ParamSpec


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
        size = spec.numel if local else spec.gathered_numel(tp)
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
