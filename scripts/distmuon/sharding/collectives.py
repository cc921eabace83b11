"""The wires: process groups of ours, with every collective of a step written to the ledger.

torch 2.13 renames `all_gather_into_tensor` and `reduce_scatter_tensor` to `all_gather_single` and
`reduce_scatter_single` and warns about the old names; 2.11 has only the old ones. Nobody else calls either.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.sharding.hooks import COMMUNICATION, hooked, of_kind
from distmuon.sharding.ledger import Ledger

_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextlib.contextmanager
def waiting_at_the_end(started: list[PendingWork]) -> Iterator[None]:
    """Leave nothing under way at the block's end, nor after an error, which stays the first.

    started: what to wait for; it may grow, and is empty afterwards.
    """
    try:
        yield
        for pending in filter(len, started):
            pending.wait()
    except BaseException:
        for pending in started:
            with contextlib.suppress(RuntimeError):
                pending.wait()
        raise
    finally:
        started.clear()


def numbers_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:  # [n]
    """Return numbers of the host as a tensor on a device; on a GPU the host does not wait until they are there."""
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=pinned)


def add_up_(
    out: Tensor,  # [len]
    parts: Tensor,  # [n, len]
) -> None:
    """Fill `out` with the sum of the parts, one addition per rank, in rank order."""
    first, *others = parts.unbind()
    out.copy_(first)
    for other in others:
        out += other


def backend_of(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return what carries the group's tensors on such a device: "nccl" of "cpu:gloo,cuda:nccl"."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(",")).get(device_type)


class PendingWork:
    """Collectives that were started and have not been waited for.

    It holds their tensors, too: a backend may read and write them until the wait, and nobody else
    has to keep them.
    """

    def __init__(self) -> None:
        self._started: list[tuple[Any, tuple[Tensor, ...], list[Callable[[], object]]]] = []

    def __len__(self) -> int:
        return len(self._started)

    def add(self, work: Any, *tensors: Tensor) -> None:
        """Remember a collective that was started, and the tensors it reads and writes."""
        self._started.append((work, tensors, []))

    def then(self, action: Callable[[], object]) -> None:
        """Run an action when the latest collective has been waited for."""
        self._started[-1][2].append(action)

    @hooked
    @of_kind(COMMUNICATION)
    def wait(self) -> None:
        """Wait for all, oldest first: from here on what they bring is there.

        Raises RuntimeError where one fails.
        """
        while self._started:
            work, _, actions = self._started[0]
            work.wait()
            for action in actions:
                action()
            del self._started[0]


class Received(NamedTuple):
    """What came from each rank, in rank order, this one included: the head of its parcel, and the tensors in it."""

    heads: list[Tensor]  # each [h]
    tensors: list[Sequence[Tensor]]


@dataclass
class Group:
    """One process group as one of its ranks sees it. A group of one rank calls nothing and records nothing.

    name: "dp", "tp", "world", or for others "pp" and "mesh": how it appears in the ledger.
    size, rank: of and in this group. process_group: torch's handle; None where size is 1.
    native_reduce_scatter: use the backend's own (NCCL), or all-to-all and a local sum (gloo: 2.7 times faster than its
        reduce-scatter when this was written, and it adds in rank order, so that results are reproducible bit by bit).
    """

    name: str
    size: int = 1
    rank: int = 0
    process_group: Any = None
    ledger: Ledger = field(default_factory=Ledger)
    native_reduce_scatter: bool = False
    _pending: PendingWork | None = None

    @classmethod
    def of_process_group(
        cls, name: str, group: dist.ProcessGroup, ledger: Ledger, native_reduce_scatter: bool = False
    ) -> Group:
        """Return one of torch's groups as this rank, a member, sees it."""
        return cls(name, dist.get_world_size(group), dist.get_rank(group), group, ledger, native_reduce_scatter)

    def __deepcopy__(self, memo: Any) -> Group:
        """Return the group itself: a copied layer, such as an average of weights, talks over the same wires."""
        return self

    @contextlib.contextmanager
    def async_collectives(self, pending: PendingWork | None = None) -> Iterator[PendingWork]:
        """Inside the block, collectives only start, all_reduce and broadcast apart; the pending work waits for all.

        Until then their results must not be read; views of them may be made. pending: to be added to.
        """
        outer, self._pending = self._pending, PendingWork() if pending is None else pending
        try:
            yield self._pending
        finally:
            self._pending = outer

    def when_there(self, action: Callable[[], object]) -> None:
        """Run an action on what the latest collective brings: now, or after the wait, if it was only started."""
        if self._pending is None or self.size == 1:
            action()
        else:
            self._pending.then(action)

    @of_kind(COMMUNICATION)
    def all_gather(
        self,
        shard: Tensor,  # [len], contiguous; may lie in `out`
        label: str,
        out: Tensor | None = None,  # [n * len], contiguous
    ) -> Tensor:  # [n * len]
        """Return every rank's `shard` in rank order, in `out` if given; where there is one rank, its shard itself."""
        if self.size == 1:
            return shard
        out = shard.new_empty(self.size * shard.numel()) if out is None else out
        self._record("all_gather", out, label)
        self._make(_all_gather_flat, out, shard)
        return out

    def all_gather_blocks(
        self,
        block: Tensor,  # [a, b]
        dim: int,
        label: str,
    ) -> Tensor:  # [n a, b] for dim 0, [a, n b] for dim 1; contiguous
        """Return every rank's `block` concatenated along `dim`."""
        if self.size == 1:
            return block
        blocks = self.all_gather(block.reshape(-1), label).view(self.size, *block.shape)  # [n, a, b]
        return blocks.movedim(0, dim).flatten(dim, dim + 1)  # for dim 0 a view, for dim 1 one copy

    @of_kind(COMMUNICATION)
    def reduce_scatter(
        self,
        full: Tensor,  # [n * len], contiguous
        out: Tensor,  # [len], this rank's part of `full`
        label: str,
    ) -> Tensor:  # [len]
        """Fill `out` with its sum over ranks; the rest of `full` stays.

        The sum is taken in rank order, one addition per rank, unless the backend's own
        reduce-scatter is used.
        """
        if self.size == 1:
            return out
        self._record("reduce_scatter", full, label)
        if self.native_reduce_scatter:
            self._make(_reduce_scatter_flat, out, full)
        else:
            parts = self._exchange(full).view(self.size, len(out))  # [n, len]
            self.when_there(lambda: add_up_(out, parts))
        return out

    @of_kind(COMMUNICATION)
    def all_to_all(
        self,
        parcels: Tensor,  # [n * len], contiguous: part r is for rank r
        label: str,
    ) -> Tensor:  # [n * len]
        """Return what came for this rank, in rank order."""
        if self.size == 1:
            return parcels
        self._record("all_to_all", parcels, label)
        return self._exchange(parcels)

    @of_kind(COMMUNICATION)
    def all_to_all_v(
        self,
        parcels: Sequence[Tensor],  # n flat tensors, one for each rank, its own empty; of one dtype
        lengths: Sequence[int],
        label: str,
    ) -> list[Tensor]:  # n flat tensors [lengths[r]]
        """Send every rank its parcel; return what came from each. lengths: of what comes, in rank order."""
        if self.size == 1:
            return list(parcels)
        packed = torch.cat(list(parcels))
        self._record("all_to_all", packed, label, packed.numel())
        received = self._exchange(packed, lengths, [parcel.numel() for parcel in parcels])
        return list(received.split(list(lengths)))

    def exchange(
        self,
        parcels: Sequence[Sequence[Tensor]],  # n, one for each rank, of any number of tensors of one dtype
        shapes: Sequence[Sequence[Sequence[int]]],  # n, of the tensors that come from each
        label: str,
        head: Tensor,  # [h], of the same dtype and on the same device: before every parcel; [0] where none is needed
    ) -> Received:
        """Send every rank a parcel of tensors, in one all-to-all; return what came from each, as views of one tensor.

        This rank's own parcel does not travel: it is handed over as it is.
        """
        others = [rank != self.rank for rank in range(self.size)]
        flat = [
            torch.cat([head, *(tensor.reshape(-1) for tensor in parcel)]) if travels else head[:0]
            for parcel, travels in zip(parcels, others, strict=True)
        ]
        sizes = [[len(head), *(math.prod(shape) for shape in of_rank)] for of_rank in shapes]
        lengths = [sum(of_rank) if travels else 0 for of_rank, travels in zip(sizes, others, strict=True)]
        heads, tensors = list[Tensor](), list[Sequence[Tensor]]()
        for rank, came in enumerate(self.all_to_all_v(flat, lengths, label)):
            if others[rank]:
                first, *parts = came.split(sizes[rank])
                heads.append(first)
                tensors.append([part.view(*shape) for part, shape in zip(parts, shapes[rank], strict=True)])
            else:
                heads.append(head)
                tensors.append(parcels[rank])
        return Received(heads, tensors)

    @of_kind(COMMUNICATION)
    def all_reduce(self, tensor: Tensor, label: str, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Replace `tensor`, contiguous, by its sum over ranks; or by what another `dist.ReduceOp` makes of it."""
        if self.size > 1:
            self._record("all_reduce", tensor, label)
            dist.all_reduce(tensor, op, group=self.process_group)
        return tensor

    @of_kind(COMMUNICATION)
    def broadcast(self, tensor: Tensor, label: str) -> Tensor:
        """Replace `tensor`, contiguous, by that of the group's rank 0."""
        if self.size > 1:
            self._record("broadcast", tensor, label)
            dist.broadcast(tensor, group_src=0, group=self.process_group)
        return tensor

    def _exchange(
        self, parcels: Tensor, coming: Sequence[int] | None = None, going: Sequence[int] | None = None
    ) -> Tensor:
        """Return what came, in rank order. coming, going: elements from and to every rank, where they are not equal."""
        received = torch.empty_like(parcels) if coming is None else parcels.new_empty(sum(coming))
        lengths = [None if of_ranks is None else list(of_ranks) for of_ranks in (coming, going)]
        self._make(dist.all_to_all_single, received, parcels, *lengths)
        return received

    def _make(self, collective: Callable[..., Any], out: Tensor, payload: Tensor, *more: Any) -> None:
        """Make a collective that reads `payload` and fills `out`; inside `async_collectives` only start it."""
        work = collective(out, payload, *more, group=self.process_group, async_op=self._pending is not None)
        if self._pending is not None:
            self._pending.add(work, payload, out)

    def _record(self, op: str, payload: Tensor, label: str, sent: int | None = None) -> None:
        """Add a call to the ledger. sent: elements that this rank sends, where the ring's formula does not say."""
        item = payload.element_size()
        sent_bytes = None if sent is None else sent * item
        self.ledger.record(op, self.name, self.size, payload.numel() * item, label, sent_bytes=sent_bytes)
