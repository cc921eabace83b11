"""What every rank of a planned world holds and sends, all of them at once, to the byte; and what a step waits for.

`model_states.predict_shards` and `prediction.predict_step` say the same of one rank. Asking them 8,192 times takes
hours; here a sweep over the map answers for all, in arrays over ranks, and tests hold the two equal on small worlds.
A step waits for the slowest rank of every move:

    gradients        reduce-scatter over DP, bucket by bucket
    momentum         over DP, bucket by bucket, where a strategy sends it
    orthogonalizing  moves over TP and Newton–Schulz of a bucket's slowest rank, for which all others wait
    parameters       all-gather over DP, bucket by bucket
    summary          one small all-reduce of everybody, down and up a tree

One after the other: nothing overlaps, as in this book's optimizer. Elementwise arithmetic is left out.

Shards go around NCCL's rings. The parcels of `gather_cut` go to those ranks alone that own a part of the same matrix.
Of two owners, neighbours, they load the links as a ring does, and so they are charged; where a matrix has many owners
they take longer than that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from distmuon.sharding.gradients import STATISTICS_LABEL
from distmuon.sharding.layout import ITEM_BYTES, Bucket, Layout
from distmuon.sharding.ledger import Ledger
from distmuon.verify.prediction import STATISTICS_BYTES
from muonbook.planner.cost_model import TP_EXCHANGE, LinkCost, hops
from muonbook.planner.planned_worlds import PlannedWorld

Move = tuple[str, str]  # the group in which it sends, and what: ("dp", "gradients")


class Messages(NamedTuple):
    """What goes over one link: hops, one after the other, and bytes that a rank sends. link: its name in
    `Fabric.links`."""

    link: str
    hops: float
    sent_bytes: float

    def seconds(self, links: Mapping[str, LinkCost]) -> float:
        link = links[self.link]
        return self.hops * link.alpha_seconds + self.sent_bytes / link.bytes_per_second


def messages_of(ledger: Ledger, label: str, group: str, sizes: Mapping[str, int], latency: str = "ring") -> Messages:
    """Return what a ledger has of some collectives. label: how theirs begins. sizes: ranks of every group."""
    found = [(entry, traffic) for entry, traffic in ledger if entry.group == group and entry.label.startswith(label)]
    steps = sum(traffic.calls * hops(entry.op, sizes[group], latency) for entry, traffic in found)
    return Messages(group, steps, sum(traffic.sent_bytes for _, traffic in found))


def states(world: PlannedWorld, muon: bool = True) -> dict[str, np.ndarray]:
    """Return {kind of `model_states.KINDS`: [D] int64 bytes} of every DP rank. muon: False: AdamW for everything."""
    layout, mine = world.layout, world.muon if muon else frozenset()
    kinds = ("parameters", "gradients", "masters", "momentum", "exp_avg", "exp_avg_sq", "counters")
    found = {kind: np.zeros(world.dp, np.int64) for kind in kinds}
    for bucket in layout.buckets:
        buffer = layout.buffers[bucket.buffer_idx]
        item = ITEM_BYTES[buffer.grad_dtype]
        ends = _ends(bucket)
        found["parameters"] += bucket.padded * ITEM_BYTES[buffer.param_dtype]
        found["gradients"] += bucket.padded * item
        if buffer.grad_dtype != buffer.param_dtype:
            found["masters"] += item * bucket.shard_size
        others = [index for index in bucket.params if index not in mine]
        in_adamw = item * _owned(layout, bucket, others, ends)
        found["exp_avg"] += in_adamw
        found["exp_avg_sq"] += in_adamw
        found["momentum"] += item * _owned(layout, bucket, [i for i in bucket.params if i in mine], ends)
        for index in others:
            owners = layout.owners(bucket, index)
            found["counters"][owners.start : owners.stop] += 4
    return found


def outer_messages(world: PlannedWorld, muon: bool = True) -> dict[str, Messages]:
    """Return "gradients", "momentum", "parameters" and "summary" of one step; of what differs, each bucket's slowest.

    muon: False: AdamW for everything.
    """
    ledger, sizes = world.ledger(muon=muon), {"dp": world.dp, "tp": world.tp, "world": world.dp * world.tp}
    momentum = Messages("dp", 0, 0)
    if muon:
        momentum = Messages("dp", world.momentum_hops(), sum(each.max().item() for each in world.momentum_sent()))
    return {
        "gradients": _shards(world, "reduce_scatter", "grad_dtype"),
        "momentum": momentum,
        "parameters": _shards(world, "all_gather", "param_dtype"),
        "summary": messages_of(ledger, STATISTICS_LABEL, "world", sizes, "tree"),
    }


def _shards(world: PlannedWorld, op: str, dtype: str) -> Messages:
    """Return what a collective of every bucket asks: D - 1 shards, around a ring. dtype: "grad_dtype" and the like."""
    layout = world.layout
    own = sum(ITEM_BYTES[getattr(layout.buffers[b.buffer_idx], dtype)] * b.shard_size for b in layout.buckets)
    return Messages("dp", len(layout.buckets) * hops(op, world.dp), (world.dp - 1) * own)


def orthogonalizing_seconds(
    groups: Mapping[tuple, float], tp: int, link: LinkCost, flops_per_second: float
) -> dict[str, float]:
    """Return "orthogonalizing", and the part of it that is "tp_gather". groups: `PlannedWorld.bucket_groups`."""
    alpha, rate = hops("all_gather", tp) * link.alpha_seconds, link.bytes_per_second
    found = {"orthogonalizing": 0.0, "tp_gather": 0.0}
    for loads, times in groups.items():
        gathers = [load.calls * alpha + load.sent_bytes / rate for load in loads]
        ends = [g + load.flops / flops_per_second for g, load in zip(gathers, loads, strict=True)]
        found["tp_gather"] += times * max(gathers)
        found["orthogonalizing"] += times * max(ends)
    return found


def by_group(moves: Mapping[Move, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what every rank sends in each group, its moves added up."""
    found: dict[str, np.ndarray] = {}
    for (group, _), amounts in moves.items():
        found[group] = found.get(group, 0) + amounts
    return found


def _ends(bucket: Bucket) -> np.ndarray:
    """Return where the shards of a bucket begin and end, counted from its first element, [D + 1]."""
    return np.arange(bucket.dp + 1, dtype=np.int64) * bucket.shard_size


def _owned(layout: Layout, bucket: Bucket, indices: Collection[int], ends: np.ndarray) -> np.ndarray:
    """Return how many elements of these parameters, in storage order, lie in every shard of the bucket, [D]."""
    runs: list[list[int]] = []  # neighbours in one
    for index in indices:
        where = layout.global_ranges[index].relative_to(bucket.offset)
        if runs and runs[-1][1] == where.start:
            runs[-1][1] = where.end
        else:
            runs.append([where.start, where.end])
    return sum((np.diff(np.clip(ends, low, high)) for low, high in runs), np.zeros(len(ends) - 1, np.int64))


@dataclass(frozen=True)
class Zero1Part:
    """Parameters that our optimizers keep as ZeRO-1 does: whole weights and gradients, 1/D of all else.

    muon: False: AdamW for everything. Arrays are over ranks: [D], or [D x T] where TP ranks of a row differ.
    """

    world: PlannedWorld
    muon: bool = True
    passing_bytes: ClassVar[int] = 0  # parameters are whole, always

    @property
    def dp(self) -> int:
        return self.world.dp

    def states(self) -> dict[str, np.ndarray]:
        return states(self.world, self.muon)

    def sent(self) -> dict[Move, np.ndarray]:
        """Return {move: bytes that every rank sends in a step}: int64, but of unequal steps float, their mean."""
        none, alike = np.zeros(self.dp, np.int64), self._messages
        over_tp = self.world.rank_loads()[1] if self.muon else none
        everybody = np.ones(len(over_tp), np.int64)
        momentum = self.world.momentum_sent() if self.muon else []  # of DP ranks, or of all
        return {
            ("dp", "gradients"): int(alike["gradients"].sent_bytes) * everybody,
            ("world", "statistics"): int(alike["summary"].sent_bytes) * everybody,
            ("dp", "momentum"): sum((np.repeat(each, len(over_tp) // len(each)) for each in momentum), 0 * everybody),
            ("tp", "momentum"): over_tp,
            ("dp", "parameters"): int(alike["parameters"].sent_bytes) * everybody,
        }

    def flops(self) -> np.ndarray:
        """Return what Newton–Schulz costs every rank."""
        return self.world.rank_loads()[2].astype(np.float64) if self.muon else np.zeros(self.dp)

    @cached_property
    def update_bytes(self) -> int:
        """Bound of what a step allocates, on the worst rank, by `prediction.predict_transient`, on NCCL in bf16."""
        layout = self.world.layout
        items = [ITEM_BYTES[layout.buffers[bucket.buffer_idx].grad_dtype] for bucket in layout.buckets]
        adamw = max(3 * item * bucket.shard_size for item, bucket in zip(items, layout.buckets, strict=True))
        moves = self.world.transient_bytes if self.muon else 0
        return max(adamw, moves) + STATISTICS_BYTES * (len(layout.specs) + 1)

    def update_seconds(self, links: Mapping[str, LinkCost], flops_per_second: float) -> dict[str, float]:
        """Return seconds of the update, part by part, one after the other."""
        found = {name: each.seconds(links) for name, each in self._messages.items()}
        waits = {"orthogonalizing": 0.0, "tp_gather": 0.0}
        if self.muon:
            link = links[TP_EXCHANGE if self.world.has_owners else "tp"]
            waits = orthogonalizing_seconds(self.world.bucket_groups, self.world.tp, link, flops_per_second)
        return found | {
            "blocks over TP": waits["tp_gather"],
            "Newton–Schulz": waits["orthogonalizing"] - waits["tp_gather"],
        }

    @cached_property
    def _messages(self) -> dict[str, Messages]:
        return outer_messages(self.world, self.muon)
