"""Gradients on their way to the optimizer: added up in flat buffers, measured, checked, clipped.

Ranks must agree before anyone touches its state: if one skipped a step because its shard holds a NaN while the others
went on, parameters would differ for ever after. One small all-reduce per step settles three questions at once: the
global norm, which parameter is not finite, and which parameters have a gradient at all.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from distmuon.sharding.buffers import ShardedBuffers
from distmuon.sharding.collectives import numbers_on
from distmuon.sharding.consistency import Lines, all_equal, checksum
from distmuon.sharding.grid import Grid
from distmuon.sharding.precision import widest
from distmuon.sharding.tensor_lists import copy_each_

STATISTICS_LABEL = "gradient summary"  # in ledgers, and in every stored one
STAGES_LABEL = "stages' summaries"  # in ledgers


class NonFiniteGradient(FloatingPointError):
    """A gradient, or its square, is not finite. Raised on every rank, before any state has changed."""


class StageSummary(NamedTuple):
    """What a pipeline stage says of its step. squares: of its gradients' norms, in all. finite: whether each is.
    agreed: whether its ranks agree to make it. step: a digest of what all stages must have alike.
    """

    squares: float
    finite: bool
    agreed: bool
    step: float


@dataclass(frozen=True)
class GradientStatistics:
    """What all ranks know of the P parameters' gradients after the all-reduce, and know alike.

    squared_norms: of the mean gradient over DP, whole over TP; in the widest dtype of its device, on the CPU.
    largest: the largest square that the gradient's dtype holds.
    present: indices of the parameters that got a gradient on at least one rank.
    agreed: whether all ranks have the same options. touched: whether any rank's parameters were written to in between.
    stages: what the stages of a pipeline have said, in their order; none where there is no pipeline.
    """

    squared_norms: Tensor  # [P]
    largest: Tensor  # [P], as squared_norms
    present: frozenset[int]
    agreed: bool
    touched: bool
    stages: Sequence[StageSummary] = ()

    @property
    def norm(self) -> float:
        """The global gradient norm: over all parameters, each counted once whatever the grid, without padding."""
        squares = [stage.squares for stage in self.stages] or [float(self.squared_norms.sum())]
        return math.sqrt(sum(squares))

    @property
    def finite(self) -> bool:
        """Whether no gradient of any stage is among the `non_finite`."""
        return not self.non_finite and all(stage.finite for stage in self.stages)

    @property
    def stages_agree(self) -> bool:
        """Whether the ranks of every stage agree, and all stages do the same step."""
        return all(stage.agreed and stage.step == self.stages[0].step for stage in self.stages)

    @property
    def non_finite(self) -> list[int]:
        """Indices of the parameters whose gradient has a NaN, an infinity, or a norm whose square overflows.

        The last is 1.8e19 in float32. Such a gradient is finite, but AdamW's second moment and a sum of momentum that
        it enters are not.
        """
        return (~(self.squared_norms <= self.largest)).nonzero().flatten().tolist()


Versions = dict[int, tuple[Tensor | None, int]]  # by index in the map: (gradient, its version)


class GradientViews:
    """Lets autograd add gradients up in the flat buffers: a parameter's `.grad`, once there is one, is its home there.

    `.grad` stays what torch users expect: None until a backward pass reaches the parameter, and again once somebody
    has dropped it. A hook on the parameter's node of the graph offers the home, emptied, where autograd would
    otherwise make a tensor. The home may be wider than the parameter: a bf16 model adds its micro-batches in float32.
    """

    def __init__(self, buffers: ShardedBuffers) -> None:
        self.buffers = buffers
        self._nodes: list[Any] = [None] * len(buffers.parameters)  # alive as long as this is, and the hooks with them
        self._offered: list[Any] = [lambda: None] * len(buffers.parameters)  # weak: the latest `.grad` at each home
        self._versions = [0] * len(buffers.parameters)  # of those, after the latest backward pass
        self.before: Callable[[int], None] = lambda index: None  # called when a gradient is about to be added
        self.after: Callable[[int], None] = lambda index: None  # and when it has been
        self.watch_all()
        for index in self.collect(range(len(buffers.parameters))):
            self._rebind(index)

    def collect(self, indices: Collection[int]) -> set[int]:
        """Bring the gradients of the parameters `indices` home; return those that have one.

        A `.grad` that is the home is there already. None was never there, or was dropped: zeros. Any other tensor,
        such as one that was set by hand, takes the home's place.
        """
        present, external_grads = set(), {}
        for index in indices:
            p, home = self.buffers.parameters[index], self.buffers.gradient_homes[index]
            if p.grad is None:
                self._empty(index)
                continue
            present.add(index)
            # to_dense: of one that was set by hand; autograd adds a sparse one to the home, which is dense, by itself
            external = p.grad.detach().to_dense() if p.grad.is_sparse else p.grad.detach()
            if not _same_place(external, home):
                flats = self.buffers.flat_gradients
                aliases_buffer = any(0 <= external.data_ptr() - flat.data_ptr() < flat.nbytes for flat in flats)
                # a clone, where it lies in a home that is about to be filled
                external_grads[index] = external.clone() if aliases_buffer else external
        for index in external_grads:
            self._leave(index)
        copy_each_((self.buffers.gradient_homes[index], external) for index, external in external_grads.items())
        return present

    def unscale(self, scale: Tensor) -> None:
        """Divide all gradients, after `collect`, by the `scale` of this rank's loss."""
        for flat in self.buffers.flat_gradients:
            flat.mul_(scale.to(widest(scale.device)).reciprocal().to(flat.dtype))

    def versions(self, indices: Collection[int]) -> Versions:
        """Return gradients as they are at this moment, for `changed` to compare."""
        found = [(index, self.buffers.parameters[index].grad) for index in indices]
        return {index: (grad, 0 if grad is None else grad._version) for index, grad in found}

    def changed(self, before: Versions) -> list[int]:
        """Return the parameters whose gradient was added to, dropped or set since these `versions`."""
        pairs = zip(before.items(), self.versions(before).values(), strict=True)
        return [index for (index, (old, then)), (new, now) in pairs if old is not new or then != now]

    def watch_all(self) -> None:
        """Hook every parameter's node that is not hooked yet: a change of dtype gives it a new one."""
        me = weakref.ref(self)  # a node may outlive the optimizer
        for index, p in enumerate(self.buffers.parameters):
            frozen = not p.requires_grad
            node = get_gradient_edge(p.requires_grad_(True)).node  # the node stays when the parameter is frozen again
            p.requires_grad_(not frozen)
            if node is not self._nodes[index]:
                p.grad_dtype = None  # any: the home's may differ from the parameter's
                node.register_prehook(lambda _, index=index: views.bind_grad_view(index) if (views := me()) else None)
                node.register_hook(lambda *_, index=index: views.after(index) if (views := me()) else None)
                self._nodes[index] = node

    def changed_since_backward(self) -> bool:
        """Return whether somebody has written into a gradient, in place, after autograd."""
        rows = zip(self.buffers.parameters, self._offered, self._versions, strict=True)
        return any(
            p.grad is not None and p.grad is offered() and p.grad._version > version for p, offered, version in rows
        )

    def bind_grad_view(self, index: int) -> None:
        """Let `.grad`, where there is none, be the parameter's home in the flat gradients, emptied."""
        p = self.buffers.parameters[index]
        if not self.buffers.owns(p):
            return
        self.before(index)
        if p.grad is None:
            self._empty(index)
            self._rebind(index)
        assert p.grad is not None
        self._versions[index] = p.grad._version + 1  # autograd's addition follows

    def _rebind(self, index: int) -> None:
        """Let `.grad` be the home, by a tensor of its own: `p.grad.data = t` moves that one out, not the home."""
        p, home = self.buffers.parameters[index], self.buffers.gradient_homes[index]
        p.grad = home.data
        self._offered[index] = weakref.ref(p.grad)

    def _empty(self, index: int) -> None:
        """Fill the home with zeros."""
        self._leave(index)
        self.buffers.gradient_homes[index].zero_()

    def _leave(self, index: int) -> None:
        """Let a dropped `.grad` that somebody still holds keep its values, as torch's does, elsewhere."""
        held, home = self._offered[index](), self.buffers.gradient_homes[index]
        if held is not None and held is not self.buffers.parameters[index].grad and _same_place(held, home):
            held.data = held.clone()


def _same_place(tensor: Tensor, home: Tensor) -> bool:
    """Return whether both are the same elements of the same storage."""
    return tensor.data_ptr() == home.data_ptr() and tensor.stride() == home.stride() and tensor.dtype == home.dtype


def statistics(buffers: ShardedBuffers, present: set[int], options: Lines, touched: bool) -> GradientStatistics:
    """Return what the reduced gradients amount to, over the whole grid: one all-reduce of 2 P + 3 numbers.

    present: indices of the parameters that have a gradient on this rank. Over DP the shards' squares add up. Over TP,
    split parameters add up too; replicated ones are the same on every TP rank and count on rank 0 alone (but a NaN
    counts anywhere: 0 * NaN). options, touched: of this rank; the last three numbers are its vote.
    """
    count, ranks = len(buffers.parameters), buffers.grid.world.size
    wide = widest(buffers.grid.device)
    pieces = [piece for of_bucket in buffers.pieces.values() for piece in of_bucket]
    counted = [0.0] * count  # whether this rank's part of a parameter is to be counted
    for piece in pieces:
        counted[piece.index] = float(piece.meta.tp_split_dim is not None or buffers.grid.tp.rank == 0)
    presence_here = [float(index in present) for index in range(count)]
    # one copy from the host, and one call for all norms: on a GPU each call costs the host time
    line = [*counted, *presence_here, *checksum(options, ranks, wide), float(touched)]
    numbers = numbers_on(buffers.grid.device, line, wide)
    if pieces:
        by_index = [numbers.new_zeros(())] * count
        norms = torch._foreach_norm([piece.gradient for piece in pieces], dtype=wide)
        for piece, norm in zip(pieces, norms, strict=True):
            by_index[piece.index] = norm
        numbers[:count].mul_(torch.stack(by_index).square_())
    squares, presence, votes = buffers.grid.world.all_reduce(numbers, STATISTICS_LABEL).cpu().split([count, count, 3])
    largest = torch.tensor([torch.finfo(home.dtype).max for home in buffers.gradient_homes], dtype=wide)
    *checksums, touches = votes.tolist()
    with_gradient = frozenset(presence.nonzero().flatten().tolist())
    return GradientStatistics(squares, largest, with_gradient, all_equal(checksums, ranks), touches > 0)


def statistics_bytes(parameters: int) -> int:
    """Return the payload of that all-reduce."""
    return 8 * (2 * parameters + 3)


def gather_summaries(statistics: GradientStatistics, grid: Grid, step: Lines, refused: bool) -> GradientStatistics:
    """Return the statistics with what all stages of a pipeline say, for they decide on a step together.

    Gathered, since a sum has no fixed order. step: what all stages must have alike. refused: whether this one will not
    make it. Collective, over `grid.stages`.
    """
    stages, device = grid.stages, grid.device
    if stages.size == 1:
        return statistics
    wide = widest(device)
    digest, _ = checksum(step, stages.size, wide)
    squares = float(statistics.squared_norms.sum())
    row = [squares, float(not statistics.non_finite), float(statistics.agreed and not refused), digest]
    rows = stages.all_gather(numbers_on(device, row, wide), STAGES_LABEL).view(stages.size, len(row)).tolist()
    summaries = [StageSummary(squares, finite > 0, agreed > 0, digest) for squares, finite, agreed, digest in rows]
    return replace(statistics, stages=summaries)


def clip_(buffers: ShardedBuffers, norm: float, max_norm: float) -> None:
    """Scale this rank's reduced gradients so that the global `norm` is at most `max_norm`, as torch's clipping does."""
    coefficient = min(1.0, max_norm / (norm + 1e-6))
    gradients = [piece.gradient for pieces in buffers.pieces.values() for piece in pieces]
    if gradients and coefficient < 1.0:
        torch._foreach_mul_(gradients, coefficient)  # on a GPU a few launches for all of them


def require_finite(statistics: GradientStatistics, names: list[str]) -> None:
    """Raise NonFiniteGradient, naming the parameters, unless every gradient is finite."""
    if bad := statistics.non_finite:
        listed = ", ".join(names[index] for index in bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise NonFiniteGradient(
            f"the gradient of {listed} is not finite, or its square is not; the step was refused and nothing has "
            'changed. Lower the learning rate, or pass on_nonfinite="skip".'
        )
    if not statistics.finite:
        raise NonFiniteGradient(
            "a gradient of another pipeline stage is not finite, or its square is not; the step was refused on all of "
            'them, and nothing has changed. Lower the learning rate, or pass on_nonfinite="skip".'
        )
