"""Gradients on their way to the optimizer: accumulated in flat buffers, measured, checked, clipped.

Ranks must agree before anyone touches its state: if one skipped a step because its shard holds a NaN while the others
went on, parameters would differ for ever after. One small all-reduce per step settles three questions at once: the
global norm, which parameter is not finite, and which parameters have a gradient at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from distmuon.sharding.buffers import ShardedBuffers

STATISTICS_LABEL = "gradient summary"  # in ledgers, and in every stored one


class NonFiniteGradient(FloatingPointError):
    """A gradient holds a NaN or an infinity. Raised on every rank, before any state has changed."""


@dataclass(frozen=True)
class GradientStatistics:
    """What all ranks know of the P parameters' gradients after the all-reduce, and know alike.

    squared_norms: of the mean gradient over DP, whole over TP; float64, on the CPU.
    present: indices of the parameters that got a gradient on at least one rank.
    """

    squared_norms: Tensor  # [P]
    present: frozenset[int]

    @property
    def norm(self) -> float:
        """The global gradient norm: over all parameters, each counted once whatever the grid, without padding."""
        return math.sqrt(float(self.squared_norms.sum()))

    @property
    def non_finite(self) -> list[int]:
        """Indices of the parameters whose gradient has a NaN or an infinity, or overflows when squared."""
        return (~torch.isfinite(self.squared_norms)).nonzero().flatten().tolist()


class Accumulator:
    """Moves every gradient into the flat buffers as soon as autograd has finished it, and frees it.

    A parameter belongs to one accumulator at a time, for the second would find nothing: see `refuse_claimed`.
    """

    def __init__(self, buffers: ShardedBuffers) -> None:
        self.buffers = buffers
        self.present: set[int] = set()
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(index))
            for index, p in enumerate(buffers.parameters)
            if p.requires_grad
        ]
        for p in buffers.parameters:
            p._has_accumulator = True  # type: ignore[attr-defined]

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda parameter: self.collect(index, parameter)

    @torch.no_grad()
    def collect(self, index: int, parameter: Tensor) -> None:
        """Add `parameter.grad` to the flat gradients, in their dtype, and set it to None."""
        if parameter.grad is None:
            return
        if parameter.grad.layout != torch.strided:
            raise ValueError(f"parameter {self.buffers.names[index]!r} has a sparse gradient; use sparse=False.")
        self.buffers.gradient_of(index).add_(parameter.grad)
        parameter.grad = None
        self.present.add(index)

    def collect_all(self) -> None:
        """Collect gradients that somebody has set by hand, without a backward pass."""
        for index, p in enumerate(self.buffers.parameters):
            self.collect(index, p)

    def clear(self) -> None:
        """Forget everything accumulated so far."""
        self.present.clear()
        self.buffers.zero_gradients()
        for p in self.buffers.parameters:
            p.grad = None

    def close(self) -> None:
        """Remove the hooks: the parameters may then go to another optimizer."""
        for handle in self._handles:
            handle.remove()
        for p in self.buffers.parameters:
            p._has_accumulator = False  # type: ignore[attr-defined]


def refuse_claimed(name: str, parameter: Tensor) -> None:
    """Raise ValueError if an accumulator has the parameter. To be asked before anything is done to it."""
    if getattr(parameter, "_has_accumulator", False):
        raise ValueError(f"parameter {name!r} already belongs to a distributed optimizer; call its close() first.")


def statistics(buffers: ShardedBuffers, present: set[int]) -> GradientStatistics:
    """Return what the reduced gradients amount to, over the whole grid: one all-reduce of 2 P float64.

    present: what this rank accumulated. Over DP the shards' squares add up. Over TP, split parameters add up too;
    replicated ones are the same on every TP rank and count on rank 0 alone (but a NaN counts anywhere: 0 * NaN).
    """
    count = len(buffers.parameters)
    numbers = torch.zeros(2, count, dtype=torch.float64, device=buffers.grid.device)  # [squares or presence, P]
    for pieces in buffers.pieces.values():
        for piece in pieces:
            square = torch.linalg.vector_norm(piece.gradient, dtype=torch.float64).square()
            counted_here = piece.meta.tp_split_dim is not None or buffers.grid.tp.rank == 0
            numbers[0, piece.index] = square * float(counted_here)
    numbers[1, sorted(present)] = 1.0
    numbers = buffers.grid.world.all_reduce(numbers, STATISTICS_LABEL).cpu()
    return GradientStatistics(numbers[0], frozenset(numbers[1].nonzero().flatten().tolist()))


def clip_(buffers: ShardedBuffers, norm: float, max_norm: float) -> None:
    """Scale this rank's reduced gradients so that the global `norm` is at most `max_norm`, as torch's clipping does."""
    coefficient = min(1.0, max_norm / (norm + 1e-6))
    for pieces in buffers.pieces.values():
        for piece in pieces:
            piece.gradient.mul_(coefficient)


def require_finite(statistics: GradientStatistics, names: list[str]) -> None:
    """Raise NonFiniteGradient, naming the parameters, unless every gradient is finite."""
    if bad := statistics.non_finite:
        listed = ", ".join(names[index] for index in bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise NonFiniteGradient(
            f"the gradient of {listed} is not finite; the step was refused and nothing has changed. "
            'Lower the learning rate, or pass on_nonfinite="skip".'
        )
