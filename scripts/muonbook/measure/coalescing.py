"""Ways to gather many matrices: the same elements in few calls or in many. Chapter 8 counts them, 14 times them.

Over DP, from shards of the map's buckets; `compare` counts calls and bytes:

    by_piece      one call per matrix, whose pieces lie as the map has cut them: padded to the longest piece
    by_bucket     one call per bucket of the map

Each takes the DP group, the map and this rank's shards, [shard_size] per bucket, and returns {index: [numel]}, every
parameter of the map.

Over TP, from blocks of matrices:

    one_by_one      one call per matrix
    in_one_bucket   one call for all of them

`compare_shards` and `compare_blocks` take the time of both extremes, over DP and over TP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Layout, ParamSpec, plan
from distmuon.sharding.ledger import Traffic
from distmuon.verify import counter
from muonbook.measure.interleaved_timing import ended, ratios, take_turns

BUCKET_SIZE = 50_000  # elements, of the map along which `compare` gathers


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
            metas = [layout.meta(bucket, index, rank) for rank in range(layout.dp)]
            longest = max(meta.local_range.size for meta in metas)
            mine = metas[group.rank].local_range.relative_to(bucket.shard(group.rank).start)
            message = shard.new_zeros(longest)
            message[: mine.size] = shard[mine.as_slice]
            rows = group.all_gather(message, "momentum").view(layout.dp, longest)
            pieces = [row[: meta.local_range.size] for row, meta in zip(rows, metas, strict=True)]
            found[index] = torch.cat(pieces)
    return found


def by_bucket(group: Group, layout: Layout, shards: Sequence[Tensor]) -> dict[int, Tensor]:
    """Gather each bucket in one call, and cut the matrices out of it."""
    return cut_out(layout, [group.all_gather(shard, "momentum") for shard in shards])


def cut_out(layout: Layout, flats: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return every parameter as a view of its gathered bucket."""
    return {
        index: flat[layout.global_ranges[index].relative_to(bucket.offset).as_slice]
        for bucket, flat in zip(layout.buckets, flats, strict=True)
        for index in bucket.params
    }


# ---- Over TP ----------------------------------------------------------------------------------------------


def one_by_one(group: Group, blocks: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Gather each block in a call of its own."""
    return [group.all_gather_blocks(block, dim, "momentum") for block in blocks]


def in_one_bucket(group: Group, blocks: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Pack all blocks into one message, gather it in one call, and copy the matrices out of it."""
    packed = torch.cat([block.reshape(-1) for block in blocks])
    rows = group.all_gather(packed, "momentum").view(group.size, -1)
    pieces = rows.split([block.numel() for block in blocks], dim=1)  # of each matrix: [T, numel], not contiguous
    return [torch.cat([row.view_as(b) for row in piece], dim) for piece, b in zip(pieces, blocks, strict=True)]


# ---- The comparisons --------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What one rank found.

    right: whether every matrix came out bit for bit. asked, made: calls and bytes, by the ledger and as torch
    dispatched them.
    """

    right: bool
    asked: Traffic
    made: Traffic


WAYS = {"each matrix": by_piece, "each bucket": by_bucket}


def compare(grid: Grid, specs: Sequence[ParamSpec]) -> dict[str, Found]:
    """Gather whole-numbered bf16 matrices over DP in both ways, and return what was found. Collective."""
    whole = whole_numbers([(spec.numel,) for spec in specs])
    layout = plan(specs, grid.dp.size, BUCKET_SIZE)
    shards = [shard.to(grid.device) for shard in shards_of(layout, whole, grid.dp.rank)]
    acts = {name: partial(way, grid.dp, layout, shards) for name, way in WAYS.items()}
    found = {}
    for name, act in acts.items():
        grid.ledger.clear()
        with counter.CollectiveCounter() as count:
            matrices = act()
        right = all(torch.equal(matrices[index].cpu(), matrix) for index, matrix in enumerate(whole))
        found[name] = Found(right, grid.ledger.total(), count.ledger.total())
    return found


class GatherTimes(NamedTuple):
    """What one rank found for so many matrices, each [width, width].

    dim: along which they are cut over TP; None: divided over DP as the map has it. right: whether both ways gave all of
    them bit for bit. ratios: by round, the time of one bucket over that of a call per matrix.
    """

    matrices: int
    width: int
    dim: int | None
    right: bool
    ratios: list[float]


def compare_shards(grid: Grid, count: int, width: int, rounds: int) -> GatherTimes:
    """Gather whole-numbered bf16 matrices over DP, their pieces one by one and their bucket. Collective."""
    whole = whole_numbers([(width, width)] * count)
    specs = [ParamSpec(str(number), (width, width), "float32") for number in range(count)]
    layout = plan(specs, grid.dp.size, bucket_size=count * width * width)
    flat = [matrix.view(-1) for matrix in whole]
    shards = [shard.to(grid.device) for shard in shards_of(layout, flat, grid.dp.rank)]
    one_by_one, in_bucket = (partial(way, grid.dp, layout, shards) for way in (by_piece, by_bucket))
    right = all(
        torch.equal(way()[index].cpu(), matrix) for way in (one_by_one, in_bucket) for index, matrix in enumerate(flat)
    )
    return GatherTimes(count, width, None, right, _race(grid, grid.dp, one_by_one, in_bucket, rounds))


def compare_blocks(grid: Grid, count: int, width: int, dim: int, rounds: int) -> GatherTimes:
    """Gather whole-numbered bf16 matrices over TP in both ways. Collective. width: a multiple of T."""
    whole = whole_numbers([(width, width)] * count)
    blocks = [matrix.chunk(grid.tp.size, dim)[grid.tp.rank].contiguous().to(grid.device) for matrix in whole]
    one_by_one_, in_bucket = (partial(way, grid.tp, blocks, dim) for way in (one_by_one, in_one_bucket))
    right = all(
        torch.equal(matrix.cpu(), wanted)
        for way in (one_by_one_, in_bucket)
        for matrix, wanted in zip(way(), whole, strict=True)
    )
    return GatherTimes(count, width, dim, right, _race(grid, grid.tp, one_by_one_, in_bucket, rounds))


def _race(
    grid: Grid, group: Group, single: Callable[[], object], bucket: Callable[[], object], rounds: int
) -> list[float]:
    """Let both ways take turns, and return the bucket's time over that of the single calls, by round."""

    def start_together(name: str) -> None:
        group.all_reduce(torch.zeros(1, device=grid.device), "start together").item()  # come, on a GPU too

    acts = {name: ended(way, grid.device.type) for name, way in (("single", single), ("bucket", bucket))}
    seconds = take_turns(acts, rounds, warm_up=0, before=start_together)
    return ratios(seconds["bucket"], seconds["single"])


def whole_numbers(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return a bf16 tensor of each shape, the same on every rank: whole numbers below 100, which bf16 has exactly."""
    random = torch.Generator().manual_seed(8)
    return [torch.randint(-99, 100, shape, generator=random).to(torch.bfloat16) for shape in shapes]
