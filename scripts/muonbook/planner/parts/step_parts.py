"""What a step of a planned world waits for, move by move: messages and bytes of the slowest rank, in seconds on links.

    gradients        reduce-scatter over DP, bucket by bucket
    momentum         over DP, bucket by bucket, where a strategy sends it
    orthogonalizing  moves over TP and Newton–Schulz of a bucket's slowest rank, for which all others wait
    parameters       all-gather over DP, bucket by bucket
    summary          one small all-reduce of everybody, down and up a tree

One after the other: nothing overlaps, as in this book's optimizer. Elementwise arithmetic is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distmuon.sharding.collectives import piece_size
from distmuon.sharding.gradients import STATISTICS_LABEL
from distmuon.sharding.layout import ITEM_BYTES
from distmuon.sharding.ledger import Ledger
from muonbook.planner.cost_model import LinkCost, hops
from muonbook.planner.model_shapes import Shape
from muonbook.planner.planned_worlds import PlannedWorld

ACTIVATION_BYTES = ITEM_BYTES["bfloat16"]
Seconds = dict[str, float]


class Messages(NamedTuple):
    """Collectives of one group, added up: hops, one after the other, and bytes that a rank sends."""

    group: str
    hops: int
    sent_bytes: float

    def seconds(self, links: Mapping[str, LinkCost]) -> float:
        link = links[self.group]
        return self.hops * link.alpha_seconds + self.sent_bytes / link.bytes_per_second


def outer_messages(world: PlannedWorld, muon: bool = True) -> dict[str, Messages]:
    """Return "gradients", "momentum", "parameters" and "summary" of one step; of what differs, each bucket's slowest.

    muon: False: AdamW for everything.
    """
    ledger, sizes = world.ledger(muon=muon), {"dp": world.dp, "tp": world.tp, "world": world.dp * world.tp}
    found = {name: _messages(ledger, name, "dp", sizes) for name in ("gradients", "momentum", "parameters")}
    if world.strategy != "gather_all":
        slowest = {"momentum": sum(int(each.max()) for each in world.momentum_sent()) if muon else 0}
        slowest |= {"gradients": 0, "parameters": 0}
        repeats = 0  # of a reduction that takes long unequal shards piece by piece
        for bucket in world.layout.buckets:
            buffer, shards = world.layout.buffers[bucket.buffer_idx], bucket.lengths or [bucket.shard_size]
            slowest["gradients"] += ITEM_BYTES[buffer.grad_dtype] * (bucket.padded - min(shards))
            slowest["parameters"] += ITEM_BYTES[buffer.param_dtype] * (world.dp - 1) * max(shards)
            if bucket.ends:
                repeats += -(-max(shards) // piece_size(shards)) - 1
        found |= {name: found[name]._replace(sent_bytes=sent) for name, sent in slowest.items()}
        more = repeats * hops("reduce_scatter", world.dp)
        found["gradients"] = found["gradients"]._replace(hops=found["gradients"].hops + more)
    return found | {"summary": _messages(ledger, STATISTICS_LABEL, "world", sizes, "tree")}


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
