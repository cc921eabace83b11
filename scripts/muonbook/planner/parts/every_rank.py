"""What every rank of a planned world holds and sends, all of them at once, to the byte: arrays over ranks.

`model_states.predict_shards` and `prediction.predict_step` say the same of one rank. Asking them 8,192 times takes
hours; here a sweep over the map answers for all, and tests hold the two equal on small worlds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from distmuon.sharding.gradients import statistics_bytes
from distmuon.sharding.layout import ITEM_BYTES, Bucket, Layout
from distmuon.sharding.ledger import ring_bytes
from distmuon.verify.prediction import STATISTICS_BYTES
from muonbook.planner.cost_model import TP_EXCHANGE, LinkCost
from muonbook.planner.parts.step_parts import Messages, orthogonalizing_seconds, outer_messages
from muonbook.planner.planned_worlds import PlannedWorld

Move = tuple[str, str]  # the group in which it sends, and what: ("dp", "gradients")
MOVES: tuple[Move, ...] = (("dp", "gradients"), ("world", "statistics"), ("dp", "momentum"), ("tp", "momentum"),
                           ("dp", "parameters"))  # fmt: skip


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


def sent(world: PlannedWorld, muon: bool = True) -> dict[Move, np.ndarray]:
    """Return {move: int64 bytes that every rank sends in a step}, [D], or [D x T] where TP ranks of a row differ."""
    loads = world.rank_loads()[1] if muon else np.zeros(world.dp, np.int64)
    alike = world.tp if len(loads) > world.dp else 1
    gradients, parameters = np.zeros(world.dp, np.int64), np.zeros(world.dp, np.int64)
    for bucket in world.layout.buckets:
        buffer, sent_numel = world.layout.buffers[bucket.buffer_idx], (world.dp - 1) * bucket.shard_size
        gradients += ITEM_BYTES[buffer.grad_dtype] * sent_numel
        parameters += ITEM_BYTES[buffer.param_dtype] * sent_numel
    momentum = sum(world.momentum_sent(), np.zeros(world.dp, np.int64)) if muon else np.zeros(world.dp, np.int64)
    ranks = world.dp * world.tp
    everybody = ring_bytes("all_reduce", statistics_bytes(len(world.layout.specs)), ranks)
    columns = (gradients, np.full(world.dp, everybody, np.int64), momentum, parameters)
    outer = [np.repeat(column, alike) for column in columns]
    return dict(zip(MOVES, (outer[0], outer[1], outer[2], loads, outer[3]), strict=True))


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
        return sent(self.world, self.muon)

    def flops(self) -> np.ndarray:
        """Return what Newton–Schulz costs every rank."""
        return self.world.rank_loads()[2].astype(np.float64) if self.muon else np.zeros(self.world.dp)

    @cached_property
    def update_bytes(self) -> int:
        """Bound of what a step allocates, on the worst rank, by `prediction.predict_transient`, on NCCL in bf16."""
        layout = self.world.layout
        items = [ITEM_BYTES[layout.buffers[bucket.buffer_idx].grad_dtype] for bucket in layout.buckets]
        adamw = max(3 * item * bucket.shard_size for item, bucket in zip(items, layout.buckets, strict=True))
        moves = self.world.transient_bytes if self.muon else 0
        return max(adamw, moves) + STATISTICS_BYTES * (len(layout.specs) + 1)

    def update_seconds(self, links: Mapping[str, LinkCost], flops_per_second: float) -> dict[str, float]:
        """Return seconds of the update, part by part, one after the other; see `step_parts`."""
        found = {name: sum(each.seconds(links) for each in parts) for name, parts in self._messages.items()}
        waits = {"orthogonalizing": 0.0, "tp_gather": 0.0}
        if self.muon:
            link = links[TP_EXCHANGE if self.world.has_owners else "tp"]
            waits = orthogonalizing_seconds(self.world.bucket_groups, self.world.tp, link, flops_per_second)
        return found | {
            "blocks over TP": waits["tp_gather"],
            "Newton–Schulz": waits["orthogonalizing"] - waits["tp_gather"],
        }

    @cached_property
    def _messages(self) -> dict[str, list[Messages]]:
        return outer_messages(self.world, self.muon)
