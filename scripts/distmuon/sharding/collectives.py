"""The wires: process groups of ours, with every collective written to the ledger.

torch 2.13 renames `all_gather_into_tensor` and `reduce_scatter_tensor` to `all_gather_single` and
`reduce_scatter_single` and warns about the old names; 2.11 has only the old ones. Nobody else calls either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.sharding.ledger import Ledger

_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Flight:
    """Collectives that were started and have not been waited for.

    It holds their tensors, too: a backend may read and write them until the wait, and nobody else has to keep them.
    """

    def __init__(self) -> None:
        self._started: list[tuple[Any, tuple[Tensor, ...]]] = []

    def __len__(self) -> int:
        return len(self._started)

    def add(self, work: Any, *tensors: Tensor) -> None:
        """Remember a collective that was started with `async_op=True`, and the tensors it reads and writes."""
        self._started.append((work, tensors))

    def wait(self) -> None:
        """Wait for all, oldest first: from here on what they bring is there. Raises RuntimeError where one fails."""
        while self._started:
            self._started[0][0].wait()
            del self._started[0]


@dataclass
class Group:
    """One process group as one of its ranks sees it. A group of one rank calls nothing and records nothing.

    name: "dp", "tp" or "world": how it appears in the ledger. size, rank: of and in this group.
    process_group: torch's handle; None where size is 1.
    native_reduce_scatter: use the backend's own (NCCL), or all-to-all and a local sum (gloo: 2.7 times faster than its
        reduce-scatter when this was written, and it adds in rank order, so that results are reproducible bit by bit).
    """

    name: str
    size: int = 1
    rank: int = 0
    process_group: Any = None
    ledger: Ledger = field(default_factory=Ledger)
    native_reduce_scatter: bool = False
    _flight: Flight | None = None

    @contextlib.contextmanager
    def starting(self) -> Iterator[Flight]:
        """Inside the block, all_gather starts its collective and returns at once; the flight waits for all of them.

        Until then its result must not be read; views of it may be made.
        """
        outer, self._flight = self._flight, Flight()
        try:
            yield self._flight
        finally:
            self._flight = outer

    def all_gather(self, shard: Tensor, label: str, out: Tensor | None = None) -> Tensor:
        """Return every rank's `shard` [len] in rank order: [n * len], in `out` if given; `shard` may lie in it."""
        if self.size == 1:
            return shard
        out = shard.new_empty(self.size * shard.numel()) if out is None else out
        self._record("all_gather", out, label)
        work = _all_gather_flat(out, shard, group=self.process_group, async_op=self._flight is not None)
        if self._flight is not None:
            self._flight.add(work, shard, out)
        return out

    def all_gather_blocks(self, block: Tensor, dim: int, label: str) -> Tensor:
        """Return every rank's `block` [a, b] concatenated along `dim`, contiguous: [n a, b] or [a, n b]."""
        if self.size == 1:
            return block
        blocks = self.all_gather(block.reshape(-1), label).view(self.size, *block.shape)
        return blocks.movedim(0, dim).flatten(dim, dim + 1)  # for dim 0 a view, for dim 1 one copy

    def reduce_scatter(self, full: Tensor, out: Tensor, label: str) -> Tensor:
        """Fill `out` [len], this rank's part of `full` [n * len], with its sum over ranks; the rest of `full` stays.

        The sum is taken in rank order, one addition per rank, unless the backend's own reduce-scatter is used.
        """
        if self.size == 1:
            return out
        self._record("reduce_scatter", full, label)
        if self.native_reduce_scatter:
            _reduce_scatter_flat(out, full, group=self.process_group)
            return out
        received = torch.empty_like(full)
        dist.all_to_all_single(received, full, group=self.process_group)
        first, *others = received.chunk(self.size)
        out.copy_(first)
        for other in others:
            out += other
        return out

    def all_to_all(self, parcels: Tensor, label: str) -> Tensor:
        """Send part r of `parcels` [n * len] to rank r; return what came for this rank, in rank order: [n * len]."""
        if self.size == 1:
            return parcels
        self._record("all_to_all", parcels, label)
        received = torch.empty_like(parcels)
        dist.all_to_all_single(received, parcels, group=self.process_group)
        return received

    def all_reduce(self, tensor: Tensor, label: str) -> Tensor:
        """Replace `tensor`, contiguous, by its sum over ranks."""
        if self.size > 1:
            self._record("all_reduce", tensor, label)
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def broadcast(self, tensor: Tensor, label: str) -> Tensor:
        """Replace `tensor`, contiguous, by that of the group's rank 0."""
        if self.size > 1:
            self._record("broadcast", tensor, label)
            dist.broadcast(tensor, group_src=0, group=self.process_group)
        return tensor

    def _record(self, op: str, payload: Tensor, label: str) -> None:
        self.ledger.record(op, self.name, self.size, payload.numel() * payload.element_size(), label)
