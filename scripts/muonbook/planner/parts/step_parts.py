"""What a step of a planned world waits for, move by move: messages and bytes of the slowest rank, in seconds on links.

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

from collections.abc import Mapping
from typing import NamedTuple

from distmuon.sharding.gradients import STATISTICS_LABEL
from distmuon.sharding.layout import ITEM_BYTES
from distmuon.sharding.ledger import Ledger
from muonbook.planner.cost_model import LinkCost, hops
from muonbook.planner.model_shapes import Shape
from muonbook.planner.planned_worlds import PlannedWorld

ACTIVATION_BYTES = ITEM_BYTES["bfloat16"]
Seconds = dict[str, float]


class Messages(NamedTuple):
    """What goes over one link: hops, one after the other, and bytes that a rank sends. link: its name in
    `Fabric.links`."""

    link: str
    hops: int
    sent_bytes: float

    def seconds(self, links: Mapping[str, LinkCost]) -> float:
        link = links[self.link]
        return self.hops * link.alpha_seconds + self.sent_bytes / link.bytes_per_second


def outer_messages(world: PlannedWorld, muon: bool = True) -> dict[str, list[Messages]]:
    """Return "gradients", "momentum", "parameters" and "summary" of one step; of what differs, each bucket's slowest.

    muon: False: AdamW for everything.
    """
    ledger, sizes = world.ledger(muon=muon), {"dp": world.dp, "tp": world.tp, "world": world.dp * world.tp}
    momentum = _messages(ledger, "momentum", "dp", sizes)
    if muon and world.strategy == "gather_cut":
        momentum = momentum._replace(sent_bytes=sum(int(each.max()) for each in world.momentum_sent()))
    return {
        "gradients": _shards(world, "reduce_scatter", "grad_dtype"),
        "momentum": [momentum],
        "parameters": _shards(world, "all_gather", "param_dtype"),
        "summary": [_messages(ledger, STATISTICS_LABEL, "world", sizes, "tree")],
    }


def _shards(world: PlannedWorld, op: str, dtype: str) -> list[Messages]:
    """Return what a collective of every bucket asks: D - 1 shards, around a ring. dtype: "grad_dtype" and the like."""
    items = [ITEM_BYTES[getattr(world.layout.buffers[bucket.buffer_idx], dtype)] for bucket in world.layout.buckets]
    return [
        Messages("dp", hops(op, world.dp), item * (world.dp - 1) * bucket.shard_size)
        for item, bucket in zip(items, world.layout.buckets, strict=True)
    ]


def orthogonalizing_seconds(groups: Mapping[tuple, int], tp: int, link: LinkCost, flops_per_second: float) -> Seconds:
    """Return "orthogonalizing", and the part of it that is "tp_gather". groups: `PlannedWorld.bucket_groups`."""
    alpha, rate = hops("all_gather", tp) * link.alpha_seconds, link.bytes_per_second
    found = {"orthogonalizing": 0.0, "tp_gather": 0.0}
    for loads, times in groups.items():
        gathers = [load.calls * alpha + load.sent_bytes / rate for load in loads]
        ends = [g + load.flops / flops_per_second for g, load in zip(gathers, loads, strict=True)]
        found["tp_gather"] += times * max(gathers)
        found["orthogonalizing"] += times * max(ends)
    return found


def activation_messages(shape: Shape, tp: int, all_reduces: int, all_gathers: int = 0) -> Messages:
    """Return so many all-reduces and all-gathers over TP of one sequence's activations."""
    ledger, payload = Ledger(), shape.context * shape.width * ACTIVATION_BYTES
    ledger.record("all_reduce", "tp", tp, payload, "activations", all_reduces)
    ledger.record("all_gather", "tp", tp, payload, "activations", all_gathers)
    return _messages(ledger, "activations", "tp", {"tp": tp})


def _messages(ledger: Ledger, label: str, group: str, sizes: Mapping[str, int], latency: str = "ring") -> Messages:
    found = [(entry, traffic) for entry, traffic in ledger if entry.group == group and entry.label.startswith(label)]
    steps = sum(traffic.calls * hops(entry.op, sizes[group], latency) for entry, traffic in found)
    return Messages(group, steps, sum(traffic.sent_bytes for _, traffic in found))
