"""What a step of a planned world waits for, move by move: messages and bytes of the slowest rank, in seconds on links.

    gradients        reduce-scatter over DP, bucket by bucket
    momentum         over DP, bucket by bucket, where a strategy sends it
    orthogonalizing  moves over TP and Newton–Schulz of a bucket's slowest rank, for which all others wait
    parameters       all-gather over DP, bucket by bucket
    summary          one small all-reduce of everybody, down and up a tree

One after the other: nothing overlaps, as in this book's optimizer. Elementwise arithmetic is left out.

Equal shards go around NCCL's rings. Unequal ones, as an owner has them, are exchanged: `Group` reduces them by an
all-to-all and sums of its own, and gathers them by a message from every rank to every other. The parcels of
`gather_cut` go to those ranks alone that own a part of the same matrix. Of two owners, neighbours, they load the links
as a ring does, and so they are charged; where a matrix has many owners they take longer than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distmuon.sharding.collectives import chunk_numel
from distmuon.sharding.gradients import STATISTICS_LABEL
from distmuon.sharding.layout import ITEM_BYTES, Bucket
from distmuon.sharding.ledger import Ledger
from muonbook.planner.cost_model import LinkCost, exchange_in, hops
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
    buckets = world.layout.buckets
    return {
        "gradients": [_reduced(world, bucket) for bucket in buckets],
        "momentum": [momentum],
        "parameters": [_gathered(world, bucket) for bucket in buckets],
        "summary": [_messages(ledger, STATISTICS_LABEL, "world", sizes, "tree")],
    }


def _reduced(world: PlannedWorld, bucket: Bucket) -> Messages:
    """Return what the gradients of a bucket ask of its slowest rank.

    Unequal shards are exchanged and added up where they arrive, long ones piece by piece: see `Group.reduce_scatter`.
    """
    shards, item = _shards(bucket), ITEM_BYTES[world.layout.buffers[bucket.buffer_idx].grad_dtype]
    pieces = -(-max(shards) // chunk_numel(shards)) if bucket.ends else 1
    return Messages(_link(bucket), pieces * hops("reduce_scatter", world.dp), item * (bucket.padded - min(shards)))


def _gathered(world: PlannedWorld, bucket: Bucket) -> Messages:
    """Return what the parameters of a bucket ask of its slowest rank; of unequal shards, each goes to all others."""
    item = ITEM_BYTES[world.layout.buffers[bucket.buffer_idx].param_dtype]
    sent = item * (world.dp - 1) * max(_shards(bucket))
    return Messages(_link(bucket), hops("all_gather", world.dp), sent)


def _shards(bucket: Bucket) -> Sequence[int]:
    """Return how many elements of a bucket each DP rank owns; one number where that is the same for all."""
    return bucket.lengths or [bucket.shard_size]


def _link(bucket: Bucket) -> str:
    """Return over which link a bucket's shards travel: around a ring as NCCL sends them, if they are equal."""
    return exchange_in("dp") if bucket.ends else "dp"


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
