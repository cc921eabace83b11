"""Three schedules of one step: the same moves, the same collectives, the same bits, in another order.

    synchronous   gather 0, work 0, parameters 0, gather 1, work 1, parameters 1, ...        `DistributedMuon`
    naive         start all gathers, wait for all; work 0, work 1, ...; start all parameters, wait for all
    pipelined     under work k: gather k + 1 and parameters k - 1                            one bucket group ahead

*gather k* is what brings bucket group k's momentum together: over DP or, where matrices have owners, over TP. *work k*
is all from there to apply, *parameters k* the last all-gather, or that of updates. Where updates come back over TP,
that, too, is hidden: apply k and parameters k follow work k + 1. Collectives are started in one order on all ranks,
which is all that a process group asks for.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.strategies.strategy import BucketGroup, Tensors
from distmuon.sharding.collectives import PendingWork, waiting_at_the_end
from distmuon.sharding.layout import Bucket


class Gathering(NamedTuple):
    """A bucket group whose momentum is under way."""

    buckets: BucketGroup
    blocks: Tensors  # M[I_tp, J], not to be read before `pending.wait()`
    pending: PendingWork


class Worked(NamedTuple):
    """A bucket group whose updates are on their way back."""

    buckets: BucketGroup
    update_pieces: Tensors  # O[N_dp], not to be read before `pending.wait()`
    pending: PendingWork


class Publishing(NamedTuple):
    """Bucket groups whose parameters, or updates, are under way to all."""

    updates: dict[Bucket, Tensor]  # flat, [padded] each, not to be read before `pending.wait()`; {}: parameters
    pending: PendingWork


class OverlappedMuon(DistributedMuon):
    """Distributed Muon whose bucket groups need not be moved one after the other; a subclass says in which order.

    Takes what `DistributedMuon` takes. Raises ValueError for a strategy whose first moves cannot be only started.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not getattr(self.strategy, "STARTS_UNREAD", False):
            name = type(self.strategy).__name__
            raise ValueError(f"{name} reads what it gathers at once, so it cannot be pipelined; use DistributedMuon.")
        self.pending: list[PendingWork] = []  # of the present step

    def update(self) -> None:
        with waiting_at_the_end(self.pending):
            self.make_moves(self.strategy.bucket_groups())

    def make_moves(self, groups: Sequence[BucketGroup]) -> None:
        """Run AdamW, and move all bucket groups. Whatever this starts, the step waits for."""
        raise NotImplementedError

    def start(self, buckets: BucketGroup) -> Gathering:
        """Update the momentum of a bucket group and start to bring it together."""
        with self.async_collectives() as pending:
            return Gathering(buckets, self.strategy.start(buckets, self.momentum(buckets)), pending)

    def work(self, gathering: Gathering) -> Worked:
        """Make the moves from the TP gather to the DP shard; the gathering has been waited for.

        What comes back over TP is only started, if that will do.
        """
        buckets, blocks, _ = gathering
        matrices = self.strategy.tp_gather(buckets, blocks)  # -> M[I, J]
        updates = self.strategy.newton_schulz(matrices)  # -> O[I, J]
        late = self.async_collectives() if self.returns_late else contextlib.nullcontext(PendingWork())
        with late as pending:
            update_blocks = self.strategy.tp_shard(buckets, updates)  # -> O[I_tp, J]
            update_pieces = self.strategy.dp_shard(buckets, update_blocks)  # -> O[N_dp]
            return Worked(buckets, update_pieces, pending)

    def start_publication(self, worked: Worked) -> Publishing:
        """Apply, and start the all-gather of a bucket group's new parameters, or updates."""
        worked.pending.wait()
        if self.published == "updates":
            with self.async_collectives() as pending:
                return Publishing(self.gather_updates(worked.buckets, worked.update_pieces), pending)
        self.apply(worked.buckets, worked.update_pieces)  # -> W[N_dp]
        with self.async_collectives() as pending:
            for bucket in worked.buckets:
                self.all_gather(bucket)  # -> W[I_tp, J]
            return Publishing({}, pending)

    def take(self, publishing: Publishing) -> None:
        """Apply updates that were published. Parameters arrive where they live, and are waited for in the end."""
        if publishing.updates:
            publishing.pending.wait()
            self.apply_everywhere(publishing.updates)

    @property
    def returns_late(self) -> bool:
        """Whether updates come back over TP, and need not be there when `work` ends."""
        return self.strategy.RETURNS_UNREAD and self.grid.tp.size > 1

    @contextlib.contextmanager
    def async_collectives(self) -> Iterator[PendingWork]:
        """Inside the block, collectives over DP and TP are only started; the step waits for them in the end."""
        with self.grid.dp.async_collectives() as pending, self.grid.tp.async_collectives(pending):
            self.pending.append(pending)
            yield pending


class NaiveMuon(OverlappedMuon):
    """Everything is started at once and waited for at once, so that hardly anything is hidden."""

    def make_moves(self, groups: Sequence[BucketGroup]) -> None:
        self.step_adamw()
        gatherings = [self.start(buckets) for buckets in groups]
        for gathering in gatherings:
            gathering.pending.wait()
        everything = [self.work(gathering) for gathering in gatherings]
        for publishing in [self.start_publication(worked) for worked in everything]:
            self.take(publishing)


class PipelinedMuon(OverlappedMuon):
    """Under the work on bucket group k, group k + 1 is gathered, the parameters of k - 1 travel."""

    def make_moves(self, groups: Sequence[BucketGroup]) -> None:
        ahead, worked, published = self.start(groups[0]), deque[Worked](), deque[Publishing]()
        self.step_adamw()
        for following in (*groups[1:], None):
            present = ahead
            present.pending.wait()
            if following is not None:
                ahead = self.start(following)
            worked.append(self.work(present))
            self.finish(worked, published, behind=1)
        self.finish(worked, published, behind=0)

    def finish(self, worked: deque[Worked], published: deque[Publishing], behind: int) -> None:
        """Publish what is back, take what has arrived, but for the latest `behind` of each."""
        while len(worked) > (behind if self.returns_late else 0):
            published.append(self.start_publication(worked.popleft()))
        while len(published) > behind:
            self.take(published.popleft())


OVERLAPS: dict[str, type[DistributedMuon]] = {
    "synchronous": DistributedMuon,
    "naive": NaiveMuon,
    "pipelined": PipelinedMuon,
}
