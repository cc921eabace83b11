"""Three schedules of one step: the same moves, the same collectives, the same bits, in another order.

    synchronous   gather 0, work 0, parameters 0, gather 1, work 1, parameters 1, ...        `DistributedMuon`
    naive         start all gathers, wait for all; work 0, work 1, ...; start all parameters, wait for all
    pipelined     under work k: gather k + 1 and parameters k - 1                            one bucket group ahead

*gather k* is the DP gather of bucket group k, *work k* all from the TP gather to apply, *parameters k* the last
all-gather. Collectives are started in one order on all ranks, which is all that a process group asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.strategies.strategy import BucketGroup, Tensors
from distmuon.sharding.collectives import PendingWork


class Gathering(NamedTuple):
    """A bucket group whose DP gather is under way."""

    blocks: Tensors  # M[I_tp, J], not to be read before `pending.wait()`
    pending: PendingWork


class ScheduledMuon(DistributedMuon):
    """Distributed Muon whose bucket groups need not be moved one after the other; a subclass says in which order.

    Takes what `DistributedMuon` takes. Raises ValueError for a strategy whose DP gather cannot be only started.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not self.strategy.GATHERS_UNREAD:
            name = type(self.strategy).__name__
            raise ValueError(f"{name} reads what it gathers at once, so it cannot be pipelined; use DistributedMuon.")
        if self.published != "parameters":
            raise ValueError('a schedule starts parameters only; pass publish="parameters", or use DistributedMuon.')
        self.pending: list[PendingWork] = []  # of the present step

    def update(self) -> None:
        with self.waiting_at_the_end():
            self.make_moves(self.strategy.bucket_groups())

    def make_moves(self, groups: Sequence[BucketGroup]) -> None:
        """Run AdamW, and move all bucket groups. Whatever this starts, the step waits for."""
        raise NotImplementedError

    def start(self, buckets: BucketGroup) -> Gathering:
        """Update the momentum of a bucket group and start its DP gather."""
        with self.grid.dp.starting() as pending:
            self.pending.append(pending)
            return Gathering(self.strategy.dp_gather(buckets, self.momentum(buckets)), pending)

    def work(
        self,
        buckets: BucketGroup,
        blocks: Tensors,  # M[I_tp, J]
    ) -> None:
        """Make the moves from the TP gather to apply; the DP gather has been waited for."""
        matrices = self.strategy.tp_gather(buckets, blocks)  # -> M[I, J]
        updates = self.strategy.newton_schulz(matrices)  # -> O[I, J]
        update_blocks = self.strategy.tp_shard(buckets, updates)  # -> O[I_tp, J]
        update_pieces = self.strategy.dp_shard(buckets, update_blocks)  # -> O[N_dp]
        self.apply(buckets, update_pieces)  # -> W[N_dp]

    def start_parameters(self, buckets: BucketGroup) -> None:
        """Start the all-gather of a bucket group's new parameters, which arrive where they live."""
        with self.grid.dp.starting() as pending:
            self.pending.append(pending)
            for bucket in buckets:
                self.all_gather(bucket)  # -> W[I_tp, J]

    @contextlib.contextmanager
    def waiting_at_the_end(self) -> Iterator[None]:
        """Leave nothing under way at the block's end, nor after an error, which stays the first."""
        try:
            yield
            for pending in filter(len, self.pending):
                pending.wait()
        except BaseException:
            for pending in self.pending:
                with contextlib.suppress(RuntimeError):
                    pending.wait()
            raise
        finally:
            self.pending.clear()


class NaiveMuon(ScheduledMuon):
    """Everything is started at once and waited for at once, so that nothing is hidden."""

    def make_moves(self, groups: Sequence[BucketGroup]) -> None:
        self.step_adamw()
        everything = [self.start(buckets) for buckets in groups]
        for gathering in everything:
            gathering.pending.wait()
        for buckets, gathering in zip(groups, everything, strict=True):
            self.work(buckets, gathering.blocks)
        for buckets in groups:
            self.start_parameters(buckets)


class PipelinedMuon(ScheduledMuon):
    """Under the work on bucket group k, group k + 1 is gathered, the parameters of k - 1 travel."""

    def make_moves(self, groups: Sequence[BucketGroup]) -> None:
        ahead = self.start(groups[0])
        self.step_adamw()
        for buckets, following in zip_longest(groups, groups[1:]):
            present = ahead
            present.pending.wait()
            if following is not None:
                ahead = self.start(following)
            self.work(buckets, present.blocks)
            self.start_parameters(buckets)


SCHEDULES: dict[str, type[DistributedMuon]] = {
    "synchronous": DistributedMuon,
    "naive": NaiveMuon,
    "pipelined": PipelinedMuon,
}
