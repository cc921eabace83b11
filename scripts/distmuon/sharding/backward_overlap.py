"""Reduce-scatters under the backward pass: a bucket sets out as soon as all of its gradients are there.

A process group matches collectives by their order, so buckets set out in one order on every rank, and one that is
complete waits for those before it. The first pass begins with the last parameters of the map. From then on it is the
order in which buckets were complete on the first rank. What has not set out when the pass ends, because a parameter was
not used in it, follows then, so that all ranks have sent the same.
Sources: PyTorch DDP (Li et al. 2020, section 3.2.3); Megatron-LM's overlap_grad_reduce.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from distmuon.sharding.buffers import ShardedBuffers
from distmuon.sharding.collectives import PendingWork
from distmuon.sharding.gradients import GradientViews, Versions
from distmuon.sharding.layout import Bucket


class BackwardOverlap:
    """The buckets of one step whose gradients have set out for their owners, and those that wait.

    reduce_scatter: starts the collective of a bucket, or makes it, as the DP group is told.
    present: indices of the parameters that have a gradient, of the buckets that have set out.
    """

    def __init__(self, buffers: ShardedBuffers, views: GradientViews, reduce_scatter: Callable[[Bucket], None]) -> None:
        self._buffers, self._views, self._reduce_scatter = buffers, views, reduce_scatter
        self._dp = buffers.grid.dp
        self._bucket_of = {index: bucket for bucket in buffers.buckets for index in bucket.params}
        self.order = sorted(buffers.buckets, key=lambda bucket: min(bucket.params), reverse=True)
        self._learned = False
        self._complete: list[Bucket] = []  # in this pass, one after the other
        self._open = False  # inside the block
        self._missing: dict[Bucket, set[int]] = {}  # there: parameters that have no gradient yet
        self._under_way: dict[Bucket, PendingWork] = {}
        self._sent: Versions = {}
        self.present: set[int] = set()
        views.before, views.after = self._refuse_late, self._arrived

    @property
    def used(self) -> bool:
        """Whether the gradients of this step have set out."""
        return bool(self._under_way)

    @property
    def waiting(self) -> list[Bucket]:
        """The buckets that have not set out, in their order."""
        return self.order[len(self._under_way) :]

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        """Let buckets set out under the backward pass in this block."""
        if self._open or self._under_way:
            raise RuntimeError(
                "gradients of this step have been sent already; overlap_backward() is for its last backward pass alone."
            )
        self._views.watch_all()
        self._open = True
        trained = {index for index, p in enumerate(self._buffers.parameters) if p.requires_grad}
        self._missing = {bucket: trained & set(bucket.params) for bucket in self.order}
        self._complete = []
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error stays
                self._send_the_rest()
            raise
        else:
            self._send_the_rest()
        finally:
            self._open = False

    def finish(self) -> None:
        """Wait for all gradients that have set out."""
        for pending in self._under_way.values():
            pending.wait()

    def learn(self) -> None:
        """Let all ranks take the order in which buckets were complete on the first of them, once. Collective."""
        if self._learned or not self._under_way:
            return
        place = {bucket: number for number, bucket in enumerate(self._buffers.buckets)}
        rest = [bucket for bucket in self.order if bucket not in self._complete]
        numbers = torch.tensor([place[bucket] for bucket in (*self._complete, *rest)], device=self._buffers.grid.device)
        found = self._dp.broadcast(numbers, "order of the buckets").tolist()
        self.order, self._learned = [self._buffers.buckets[number] for number in found], True

    def forget(self) -> None:
        """Begin anew, after a step or instead of one. Raises RuntimeError inside the block."""
        if self._open and self._under_way:
            raise RuntimeError("gradients are being sent; leave the block of overlap_backward() before zero_grad().")
        with contextlib.suppress(RuntimeError):  # a lost rank, of whom the step has told, or the next one will
            self.finish()
        self._under_way, self._sent, self.present = {}, {}, set()

    def refuse_changed(self, unscaled: bool) -> None:
        """Raise RuntimeError for a gradient that was changed, set or dropped after it had set out.

        unscaled: whether a GradScaler has divided all of them, which changes no version.
        """
        if changed := list(self._sent) if unscaled else self._views.changed(self._sent):
            raise RuntimeError(
                f"the gradient of {self._buffers.names[changed[0]]!r} was changed after it had been sent under the "
                "backward pass; clip with max_norm or the optimizer's clip_grad_norm_, let a GradScaler unscale in "
                "step(), and change gradients only without overlap_backward()."
            )

    def _arrived(self, index: int) -> None:
        if not self._open:
            return
        missing = self._missing[own := self._bucket_of[index]]
        if missing == {index}:
            self._complete.append(own)
        missing.discard(index)
        while self.waiting and not self._missing[bucket := self.waiting[0]]:
            self._send(bucket)

    def _send_the_rest(self) -> None:
        for bucket in self.waiting:
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        self.present |= self._views.collect(bucket.params)
        with self._dp.async_collectives() as pending:
            self._reduce_scatter(bucket)
        self._under_way[bucket] = pending
        self._sent |= self._views.versions(bucket.params)

    def _refuse_late(self, index: int) -> None:
        if self._bucket_of[index] in self._under_way:
            raise RuntimeError(
                f"parameter {self._buffers.names[index]!r} gets a gradient after those of its bucket were sent; put "
                "only the last backward pass before step() into overlap_backward(), and drop sent gradients with the "
                "optimizer's zero_grad(). Checkpointing with use_reentrant=True cannot be overlapped."
            )
