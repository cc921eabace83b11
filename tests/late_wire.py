"""A wire on which a collective that is only started begins as late as it may: when somebody waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.sharding import collectives


class Trouble(Exception):
    """What a test throws into a step, and what is said of one that writes to what is to be sent."""


class LateWork:
    """A collective that only begins when somebody waits for it; until then NaN stands where its result will be."""

    def __init__(self, results: Sequence[Tensor], inputs: Sequence[Tensor], begin: Callable[[], Any]) -> None:
        kept = [tensor.clone() for tensor in inputs]  # which may lie in the results
        for tensor in results:
            tensor.fill_(torch.nan)
        for tensor, before in zip(inputs, kept, strict=True):
            tensor.copy_(before)
        self.inputs, self.kept, self.begin = inputs, kept, begin

    def wait(self) -> None:
        for tensor, before in zip(self.inputs, self.kept, strict=True):
            if not torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)):  # NaN equals NaN here
                raise Trouble("what was to be sent has been written to")
        self.begin()


@contextlib.contextmanager
def late_wire() -> Iterator[None]:
    """Let everything that is only started begin as late as it may."""

    def all_gather(out: Tensor, shard: Tensor, group: Any, async_op: bool) -> Any:
        begin = partial(honest_gather, out, shard, group=group)
        return LateWork([out], [shard], begin) if async_op else begin()

    def all_to_all(received: Tensor, parcels: Tensor, theirs: Any, mine: Any, group: Any, async_op: bool) -> Any:
        begin = partial(honest_exchange, received, parcels, theirs, mine, group=group)
        return LateWork([received], [parcels], begin) if async_op else begin()

    def reduce_scatter(out: Tensor, full: Tensor, group: Any, async_op: bool) -> Any:
        begin = partial(honest_reduce_scatter, out, full, group=group)
        return LateWork([], [full], begin) if async_op else begin()  # `out` lies in `full`

    honest_gather, honest_exchange = collectives._all_gather_flat, dist.all_to_all_single
    honest_reduce_scatter = collectives._reduce_scatter_flat
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_all_gather_flat", all_gather)
        patch.setattr(dist, "all_to_all_single", all_to_all)
        patch.setattr(collectives, "_reduce_scatter_flat", reduce_scatter)
        yield
