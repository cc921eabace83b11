"""Muon's moves weighed on tensors without data: the engine itself, as one rank of a world too large to start.

torch's FakeTensorMode makes tensors of a shape, a dtype and a storage of that size, and no numbers; its fake process
group answers every collective at once, with nothing. What the moves allocate is what they would allocate with data, on
a CPU: a GPU takes larger matrices in batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from distmuon.optim import strategies
from distmuon.optim.options import MUON_DEFAULTS
from distmuon.optim.strategies.costs import PlannedRank
from distmuon.optim.strategies.strategy import Strategy, StrategyContext
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ITEM_BYTES, Bucket, Layout
from distmuon.sharding.ledger import Ledger
from distmuon.verify.memory_tracker import StorageTracker
from muonbook.measure.trainers import SAME_EVERYWHERE

UNEVEN_OVER_TP = ("owner",)  # strategies whose TP ranks do unequal work


def weigh_moves(
    layout: Layout, muon: Collection[int], tp: int, strategy: str, dp_ranks: Collection[int], compute_dtype: str
) -> int:
    """Return the most bytes that any bucket's moves, from momentum to dp_shard, have alive on any of these ranks.

    muon: indices of Muon's matrices. What the reduction, AdamW and the last moves take is not in it. Raises
    RuntimeError where this process has a process group.
    """
    brief = {"compute_dtype": getattr(torch, compute_dtype), "ns_steps": 2}  # the others allocate what the second does
    options = MUON_DEFAULTS | SAME_EVERYWHERE | brief
    groups = dict.fromkeys(muon, options)
    known: dict[tuple[object, ...], int] = {}
    with _nobody(layout.dp, tp) as handles:
        for dp_rank in dp_ranks:
            metas = layout.view(dp_rank)
            for tp_rank in range(tp) if strategy in UNEVEN_OVER_TP else (0,):
                grid = _grid((layout.dp, dp_rank, handles["dp"]), (tp, tp_rank, handles["tp"]))
                moves = strategies.load(strategy)(StrategyContext(layout, metas, grid, groups, None))
                for bucket in layout.buckets:
                    mine = (i for i in bucket.params if i in groups and metas[i].local_range.size)
                    pieces = {index: metas[index].local_range.size for index in mine}
                    owner = getattr(moves, "tp_owner", {})
                    kinds = ((layout.specs[i][1:], owner.get(i) == tp_rank, pieces[i]) for i in pieces)  # without names
                    alike = (tp_rank, bucket.padded, *kinds)
                    if pieces and alike not in known:
                        known[alike] = _weigh_bucket(moves, layout, bucket, pieces)
    return max(known.values(), default=0)


def weigh_worst_moves(
    layout: Layout, muon: frozenset[int], tp: int, strategy: str, compute_dtype: str = "bfloat16"
) -> tuple[int, int]:
    """Return the DP rank for whose moves the strategy's own bound is largest, and `weigh_moves` of it."""
    allocates, item = strategies.costs_of(strategy).allocates, ITEM_BYTES[compute_dtype]
    ranks = [PlannedRank(layout, muon, tp, rank, compute_bytes=item) for rank in range(layout.dp)]
    bounds = [allocates(rank) for rank in ranks]
    rank = bounds.index(max(bounds))
    return rank, weigh_moves(layout, muon, tp, strategy, [rank], compute_dtype)


def _weigh_bucket(
    moves: Strategy,
    layout: Layout,
    bucket: Bucket,
    pieces: Mapping[int, int],  # {matrix: elements of it in this rank's shard}
) -> int:
    """Return the most that is alive while one bucket is moved; see `DistributedMuon.move`."""
    dtype = getattr(torch, layout.buffers[bucket.buffer_idx].grad_dtype)
    with FakeTensorMode(), StorageTracker(fakes=True) as tracker:
        for wave in moves.waves((bucket,), list(pieces)):
            momentum = {index: torch.empty(pieces[index], dtype=dtype) for index in wave}
            _move(moves, bucket, momentum)
            del momentum
    return tracker.peak


def _move(moves: Strategy, bucket: Bucket, momentum: Mapping[int, Tensor]) -> None:
    """Make the five moves of a wave; see `DistributedMuon.orthogonalize`."""
    group = (bucket,)
    blocks = moves.dp_gather(group, momentum)
    matrices = moves.tp_gather(group, blocks)
    updates = moves.newton_schulz(matrices)
    update_blocks = moves.tp_shard(group, updates)
    del blocks  # as there: and with them the gathered bucket
    moves.dp_shard(group, update_blocks)


def _grid(dp: tuple[int, int, dist.ProcessGroup], tp: tuple[int, int, dist.ProcessGroup]) -> Grid:
    """Return a rank's grid. dp, tp: size, rank and handle of its groups."""
    ledger = Ledger()
    world = Group("world", dp[0] * tp[0], dp[1] * tp[0] + tp[1], ledger=ledger)
    column, row = Group("dp", *dp, ledger=ledger), Group("tp", *tp, ledger=ledger)
    return Grid(column, row, world, torch.device("cpu"), ledger)


@contextlib.contextmanager
def _nobody(dp: int, tp: int) -> Iterator[dict[str, dist.ProcessGroup]]:
    """Yield a DP and a TP group whose other members do not exist."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise RuntimeError("this process has a process group already; weigh without data in one of its own.")
        dist.destroy_process_group()  # of this rank alone, as every world of one has it: nothing is sent there
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dp * tp)
    try:
        yield {"dp": dist.new_group(list(range(0, dp * tp, tp))), "tp": dist.new_group(list(range(tp)))}
    finally:
        dist.destroy_process_group()
