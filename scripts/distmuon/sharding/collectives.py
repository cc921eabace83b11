"""The wires: process groups of ours, with every collective written to the ledger.

torch 2.13 renames `all_gather_into_tensor` and `reduce_scatter_tensor` to `all_gather_single` and
`reduce_scatter_single` and warns about the old names; 2.11 has only the old ones. Nobody else calls either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.sharding.hooks import COMMUNICATION, hooked, of_kind
from distmuon.sharding.ledger import Ledger

_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MAX_CHUNK_NUMEL = 200_000_000  # elements that a rank receives at a time to add them up, 800 MB of float32; or more,
MAX_CHUNKS = 16  # so that no shard comes in more pieces: a message costs time, however short it is


def chunk_numel(lengths: Sequence[int]) -> int:
    """Return how many elements of its shard a rank receives from everybody at a time, where it adds them up itself.

    lengths: of all ranks' shards.
    """
    longest = max(lengths)
    return max(1, min(longest, max(MAX_CHUNK_NUMEL // len(lengths), -(-longest // MAX_CHUNKS))))


def numbers_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:  # [n]
    """Return numbers of the host as a tensor on a device; on a GPU the host does not wait until they are there."""
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=pinned)


def reduce_scatter_workspace_numel(lengths: Sequence[int], rank: int) -> int:
    """Return how many elements `Group.reduce_scatter` allocates at most on a rank that adds them up itself.

    A piece of its shard comes from everybody; where shards are longer than a piece, what goes out is packed, too.
    """
    size = chunk_numel(lengths)
    packed = sum(min(size, length) for length in lengths) if size < max(lengths) else 0
    return len(lengths) * min(size, lengths[rank]) + packed


def backend_of(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return what carries the group's tensors on such a device: "nccl" of "cpu:gloo,cuda:nccl"."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(",")).get(device_type)


def is_gpu_over_gloo(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Return whether gloo would carry a GPU's tensor, which it does only in whole collectives, by copies on the host.

    Its send and receive, and what torch's coalescing manager hands to it, take the GPU's address for one of the host's:
    they end in "Bad address", or with the process.
    """
    return tensor.is_cuda and backend_of(group, tensor.device.type) == "gloo"


class _ViaHost:
    """Messages between copies on the host; once they are waited for, what has come is where it belongs."""

    def __init__(self, works: Sequence[Any], arriving: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._works, self._arriving = works, arriving

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for part, copy in self._arriving:
            part.copy_(copy)


class PendingWork:
    """Collectives that were started and have not been waited for.

    It holds their tensors, too: a backend may read and write them until the wait, and nobody else
    has to keep them.
    """

    def __init__(self) -> None:
        self._started: list[tuple[Any, tuple[Tensor, ...]]] = []

    def __len__(self) -> int:
        return len(self._started)

    def add(self, work: Any, *tensors: Tensor) -> None:
        """Remember a collective that was started, and the tensors it reads and writes."""
        self._started.append((work, tensors))

    @hooked
    @of_kind(COMMUNICATION)
    def wait(self) -> None:
        """Wait for all, oldest first: from here on what they bring is there.

        Raises RuntimeError where one fails.
        """
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
    _pending: PendingWork | None = None

    def __deepcopy__(self, memo: Any) -> Group:
        """Return the group itself: a copied layer, such as an average of weights, talks over the same wires."""
        return self

    @contextlib.contextmanager
    def async_collectives(self, pending: PendingWork | None = None) -> Iterator[PendingWork]:
        """Inside the block, all_gather and exchange start their collective and return; the pending work waits for all.

        Until then their results must not be read; views of them may be made. pending: to be added to.
        """
        outer, self._pending = self._pending, PendingWork() if pending is None else pending
        try:
            yield self._pending
        finally:
            self._pending = outer

    @of_kind(COMMUNICATION)
    def all_gather(
        self,
        shard: Tensor,  # [len], contiguous; may lie in `out`
        label: str,
        out: Tensor | None = None,  # [n * len], contiguous
        lengths: Sequence[int] | None = None,
    ) -> Tensor:  # [n * len]
        """Return every rank's `shard` in rank order, in `out` if given.

        lengths: of all ranks' shards where they are not equal; `out` has to be given then.
        """
        if self.size == 1:
            return shard
        out = shard.new_empty(self.size * shard.numel()) if out is None else out
        self._record("all_gather", out, label, (self.size - 1) * shard.numel())
        started = self._pending is not None
        if lengths is None:
            works = [_all_gather_flat(out, shard, group=self.process_group, async_op=started)]
        else:  # gloo's all-gather wants equal shards (NCCL's, of a list, does not); so each rank sends its own to all
            works = self._send_to_all(shard, out.split(list(lengths)))
        for work in works:
            if self._pending is not None:
                self._pending.add(work, shard, out)
            elif lengths is not None:
                work.wait()
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
        lengths: Sequence[int] | None = None,
    ) -> Tensor:  # [len]
        """Fill `out` with its sum over ranks; the rest of `full` stays.

        lengths: of all ranks' parts where they are not equal. The sum is taken in rank order,
        one addition per rank, unless the backend's own reduce-scatter is used, which wants
        equal parts. Long parts are added up piece by piece, so that little is alive at a time.
        """
        if self.size == 1:
            return out
        self._record("reduce_scatter", full, label, full.numel() - out.numel())
        if self.native_reduce_scatter and lengths is None:
            _reduce_scatter_flat(out, full, group=self.process_group)
            return out
        of_ranks = [out.numel()] * self.size if lengths is None else list(lengths)
        at_once, parts = chunk_numel(of_ranks), full.split(of_ranks)
        for start in range(0, max(of_ranks), at_once):
            pieces = [part[start : start + at_once] for part in parts]
            packed = full if at_once == max(of_ranks) else torch.cat(pieces)
            self._add_up(packed, None if lengths is None else pieces, out[start : start + at_once])
            del packed  # before the next is
        return out

    def _add_up(
        self,
        packed: Tensor,  # a piece for every rank, in rank order
        pieces: Sequence[Tensor] | None,  # the same, where they are not of equal length
        out: Tensor,  # [len]
    ) -> None:
        """Send every rank its piece, and fill `out` with the sum of what came, in rank order."""
        uneven = ([len(out)] * self.size, [*map(len, pieces)]) if pieces else (None, None)
        received = self._exchange(packed, *uneven)
        first, *others = received.view(self.size, len(out)).unbind()  # n pieces [len]
        out.copy_(first)
        for other in others:
            out += other

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
        received = self._exchange(packed, lengths, [parcel.numel() for parcel in parcels], may_start=True)
        return list(received.split(list(lengths)))

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

    def _send_to_all(
        self,
        shard: Tensor,  # [len]
        parts: Sequence[Tensor],  # every rank's, to be received; the one of this rank may be the shard itself
    ) -> list[Any]:
        """Start sending the shard to all others and receiving theirs, each straight to where it belongs.

        gloo takes half the time of an all-to-all, which copies, or of its own all-gather of equal shards, a ring.
        """
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        others = [rank for rank in range(self.size) if rank != self.rank]
        arriving = {rank: parts[rank] for rank in others if len(parts[rank])}
        via_host = is_gpu_over_gloo(self.process_group, shard)
        if via_host:
            shard, homes = shard.cpu(), arriving
            arriving = {rank: torch.empty_like(part, device="cpu") for rank, part in homes.items()}
        options = {"group": self.process_group}
        operations = [dist.P2POp(dist.isend, shard, group_peer=rank, **options) for rank in others if len(shard)]
        operations += [dist.P2POp(dist.irecv, part, group_peer=rank, **options) for rank, part in arriving.items()]
        works = dist.batch_isend_irecv(operations) if operations else []
        return [_ViaHost(works, [(homes[rank], part) for rank, part in arriving.items()])] if via_host else works

    def _exchange(
        self,
        parcels: Tensor,
        coming: Sequence[int] | None = None,
        going: Sequence[int] | None = None,
        may_start: bool = False,
    ) -> Tensor:
        """Return what came, in rank order. coming, going: elements from and to every rank, where they are not equal.

        may_start: the caller does not read it, so that it need only be started where collectives are.
        """
        received = torch.empty_like(parcels) if coming is None else parcels.new_empty(sum(coming))
        theirs, mine = (None if lengths is None else list(lengths) for lengths in (coming, going))
        pending = self._pending if may_start else None
        work = dist.all_to_all_single(
            received, parcels, theirs, mine, group=self.process_group, async_op=pending is not None
        )
        if pending is not None:
            pending.add(work, parcels, received)
        return received

    def _record(self, op: str, payload: Tensor, label: str, sent: int | None = None) -> None:
        """Add a call to the ledger. sent: elements that this rank sends, where the ring's formula does not say."""
        item = payload.element_size()
        sent_bytes = None if sent is None else sent * item
        self.ledger.record(op, self.name, self.size, payload.numel() * item, label, sent_bytes=sent_bytes)
