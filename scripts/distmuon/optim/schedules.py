"""Three schedules of one step: the same moves, the same collectives, the same bits, in another order.

    synchronous   gather 0, work 0, parameters 0, gather 1, work 1, parameters 1, ...        `DistributedMuon`
    naive         start all gathers, wait for all; work 0, work 1, ...; start all parameters, wait for all
    pipelined     under work k: gather k + 1 and parameters k - 1                            one wave ahead

*gather k* is the DP gather of wave k, *work k* all from the TP gather to apply, *parameters k* the last all-gather.
Collectives are started in one order on all ranks, which is all that a process group asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.strategies.strategy import Wave, gather_dtype_name
from distmuon.sharding.collectives import Flight
from distmuon.sharding.layout import ITEM_BYTES, Layout


class Ahead(NamedTuple):
    """A wave whose DP gather is under way. blocks: TP-local matrices, not to be read before `flight.wait()`."""

    blocks: Mapping[int, Tensor]
    flight: Flight


class ScheduledMuon(DistributedMuon):
    """Distributed Muon whose waves need not be made one after the other; a subclass says in which order.

    Takes what `DistributedMuon` takes. Raises ValueError for a strategy whose DP gather cannot be only started.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not self.strategy.GATHERS_UNREAD:
            name = type(self.strategy).__name__
            raise ValueError(f"{name} reads what it gathers at once, so it cannot be pipelined; use DistributedMuon.")
        self.flights: list[Flight] = []  # of the present step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters on all ranks; return the closure's loss, if one is given."""
        loss = self._evaluate(closure)
        for bucket in self.buckets:
            self.reduce_scatter(bucket)
        if self.gradients_agreed():
            with self.landing():
                self.make_waves(self.strategy.waves())
        self.zero_grad()
        return loss

    def make_waves(self, waves: Sequence[Wave]) -> None:
        """Run AdamW, and move all waves. Whatever this starts, the step waits for."""
        raise NotImplementedError

    def start(self, wave: Wave) -> Ahead:
        """Update the momentum of a wave and start its DP gather."""
        with self.grid.dp.starting() as flight:
            self.flights.append(flight)
            return Ahead(self.strategy.dp_gather(wave, self.momentum(wave)), flight)

    def work(self, wave: Wave, blocks: Mapping[int, Tensor]) -> None:
        """Make the moves from the TP gather to apply; the DP gather has been waited for."""
        matrices = self.strategy.tp_gather(wave, blocks)
        updates = self.strategy.newton_schulz(matrices)
        blocks = self.strategy.tp_shard(wave, updates)
        self.apply(wave, self.strategy.dp_shard(wave, blocks))

    def start_parameters(self, wave: Wave) -> None:
        """Start the all-gather of a wave's new parameters, which arrive where they live."""
        with self.grid.dp.starting() as flight:
            self.flights.append(flight)
            for bucket in wave:
                self.all_gather(bucket)

    @contextlib.contextmanager
    def landing(self) -> Iterator[None]:
        """Leave nothing under way at the end of the block, not even after an error, which stays the first one."""
        try:
            yield
            for flight in filter(len, self.flights):
                flight.wait()
        except BaseException:
            for flight in self.flights:
                with contextlib.suppress(RuntimeError):
                    flight.wait()
            raise
        finally:
            self.flights.clear()


class NaiveMuon(ScheduledMuon):
    """Everything is started at once and waited for at once, so that nothing is hidden."""

    def make_waves(self, waves: Sequence[Wave]) -> None:
        self.step_adamw()
        everything = [self.start(wave) for wave in waves]
        for ahead in everything:
            ahead.flight.wait()
        for wave, ahead in zip(waves, everything, strict=True):
            self.work(wave, ahead.blocks)
        for wave in waves:
            self.start_parameters(wave)


class PipelinedMuon(ScheduledMuon):
    """Under the work on wave k, wave k + 1 is gathered and the parameters of k - 1 travel."""

    def make_waves(self, waves: Sequence[Wave]) -> None:
        ahead = self.start(waves[0])
        self.step_adamw()
        for wave, following in zip_longest(waves, waves[1:]):
            present = ahead
            present.flight.wait()
            if following is not None:
                ahead = self.start(following)
            self.work(wave, present.blocks)
            self.start_parameters(wave)


SCHEDULES: dict[str, type[DistributedMuon]] = {
    "synchronous": DistributedMuon,
    "naive": NaiveMuon,
    "pipelined": PipelinedMuon,
}


def more_transient(schedule: str, layout: Layout, muon: Collection[int], gather_dtype: str | None = None) -> int:
    """Return by how many bytes a schedule's transient memory may exceed that of the synchronous step.

        w b + m (b + B)     for each wave that is gathered while another is worked on

    with the signs of `gather_all.transient_bytes`: the momentum's pieces, the shard, the gathered bucket. Pipelined,
    that is one wave, the largest; naive, all of them. gather_dtype: as given to DistributedMuon, by name.
    """
    sizes = [0]
    for bucket in layout.buckets:
        if set(bucket.params) & set(muon):
            grad_dtype = layout.buffers[bucket.buffer_idx].grad_dtype
            item = ITEM_BYTES[gather_dtype or gather_dtype_name(grad_dtype)]
            sizes.append(ITEM_BYTES[grad_dtype] * bucket.shard_size + item * (bucket.shard_size + bucket.padded))
    return {"synchronous": 0, "naive": sum(sizes), "pipelined": max(sizes)}[schedule]
