"""Ways to gather many matrices: the same elements in few calls or in many. Chapter 8 runs and counts them.

    by_piece      one call per matrix, whose pieces lie as the map has cut them: padded to the longest piece
    by_bucket     one call per bucket of the map; with `bucket_size=1`, one per matrix, each cut into D by itself
    coalesced     the calls of by_bucket, handed to torch's coalescing manager, which makes one of them when it closes

Each takes the DP group, the map and this rank's shards, [shard_size] per bucket, and returns {index: [numel]}, every
parameter of the map. What the manager does is the backend's business: gloo copies all inputs into one flat tensor,
gathers that once and copies the outputs apart; NCCL launches the calls as one group, without copies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distmuon import counter
from distmuon.collectives import Group
from distmuon.grid import Grid
from distmuon.layout import Layout, ParamSpec, plan
from distmuon.ledger import Traffic

ROUNDS = 12  # of which `compare` takes the median time


def shards_of(layout: Layout, whole: Sequence[Tensor], dp_rank: int) -> list[Tensor]:
    """Return a DP rank's shard of every bucket, cut from whole flat tensors [numel]; padding is zeros."""
    shards = []
    for bucket in layout.buckets:
        padding = whole[0].new_zeros(bucket.padded - bucket.numel)
        flat = torch.cat([*(whole[index] for index in bucket.params), padding])
        shards.append(flat.view(layout.dp, -1)[dp_rank].clone())
    return shards


def by_piece(group: Group, layout: Layout, shards: Sequence[Tensor]) -> dict[int, Tensor]:
    """Gather each matrix in a call of its own, from the pieces that the map has cut."""
    found = {}
    for bucket, shard in zip(layout.buckets, shards, strict=True):
        for index in bucket.params:
            pieces = [layout.meta(bucket, index, rank).local_range for rank in range(layout.dp)]
            longest = max(piece.size for piece in pieces)
            mine = pieces[group.rank].relative_to(bucket.shard(group.rank).start)
            message = shard.new_zeros(longest)
            message[: mine.size] = shard[mine.as_slice]
            rows = group.all_gather(message, "momentum").view(layout.dp, longest)
            found[index] = torch.cat([row[: piece.size] for row, piece in zip(rows, pieces, strict=True)])
    return found


def by_bucket(group: Group, layout: Layout, shards: Sequence[Tensor]) -> dict[int, Tensor]:
    """Gather each bucket in one call, and cut the matrices out of it."""
    return cut_out(layout, [group.all_gather(shard, "momentum") for shard in shards])


def coalesced(group: Group, layout: Layout, shards: Sequence[Tensor]) -> dict[int, Tensor]:
    """Ask for each bucket in a call, and let torch make one of them all.

    Raises ImportError where torch has no coalescing manager: its name is private, and may go.
    """
    from torch.distributed.distributed_c10d import _coalescing_manager

    with _coalescing_manager(group=group.process_group):
        flats = [group.all_gather(shard, "momentum") for shard in shards]
    return cut_out(layout, flats)  # not before the manager has closed: until then the outputs are empty


def cut_out(layout: Layout, flats: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return every parameter as a view of its gathered bucket."""
    return {
        index: flat[layout.global_ranges[index].relative_to(bucket.offset).as_slice]
        for bucket, flat in zip(layout.buckets, flats, strict=True)
        for index in bucket.params
    }


# ---- The comparison ---------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A way to gather. bucket_size: elements, of the map that it gathers along."""

    name: str
    bucket_size: int
    gather: Callable[[Group, Layout, Sequence[Tensor]], dict[int, Tensor]]


class Found(NamedTuple):
    """What one rank found.

    right: whether every matrix came out bit for bit. asked, made: calls and bytes, by the ledger and as torch
    dispatched them. seconds: median, or 0 where no time was taken.
    """

    right: bool
    asked: Traffic
    made: Traffic
    seconds: float


WAYS = (
    Way("each matrix, pieces as they lie", 50_000, by_piece),
    Way("each matrix, cut by itself", 1, by_bucket),
    Way("the same calls, coalesced", 1, coalesced),
    Way("each bucket", 50_000, by_bucket),
)


def compare(grid: Grid, specs: Sequence[ParamSpec], timed: bool) -> dict[str, Found | None]:
    """Gather whole-numbered bf16 matrices over DP in every way; return what was found, None for a way that torch lacks.

    All ranks call it together. timed: also take turns, `ROUNDS` times, and take the time.
    """
    random = torch.Generator().manual_seed(8)
    whole = [torch.randint(-99, 100, (spec.numel,), generator=random).to(torch.bfloat16) for spec in specs]
    layouts = [plan(specs, grid.dp.size, way.bucket_size) for way in WAYS]
    shards = [[shard.to(grid.device) for shard in shards_of(layout, whole, grid.dp.rank)] for layout in layouts]
    turns = list(zip(WAYS, layouts, shards, strict=True))
    found: dict[str, Found | None] = {}
    for way, layout, mine in turns:
        grid.ledger.clear()
        try:
            with counter.CollectiveCounter() as count:
                matrices = way.gather(grid.dp, layout, mine)
        except (ImportError, NotImplementedError):
            found[way.name] = None
            continue
        right = all(torch.equal(matrices[index].cpu(), matrix) for index, matrix in enumerate(whole))
        found[way.name] = Found(right, grid.ledger.total(), count.ledger.total(), 0.0)
    seconds: dict[str, list[float]] = {name: [] for name, known in found.items() if known is not None}
    for _ in range(ROUNDS * timed):
        for way, layout, mine in turns:
            if way.name in seconds:
                began = time.perf_counter()
                way.gather(grid.dp, layout, mine)
                seconds[way.name].append(time.perf_counter() - began)
    return {
        name: known._replace(seconds=statistics.median(seconds[name])) if known is not None and timed else known
        for name, known in found.items()
    }
