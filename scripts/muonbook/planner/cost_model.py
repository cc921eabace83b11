"""What a step costs: computation, plus alpha for every message, plus bytes over bandwidth.

    seconds = computation + sum over collectives of (hops x alpha + bytes sent / bandwidth)

The alpha-beta model of Hockney (1994), beta being one over the bandwidth; ring collectives as in Thakur et al. (2005).
Nothing overlaps in it: the step of this book computes, then sends, then computes. Pure Python: no process, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distmuon.sharding.ledger import CHUNKS_SENT, Ledger, ring_bytes

LATENCIES = ("ring", "tree")
TP_EXCHANGE = "tp exchange"  # the link over which TP ranks send straight to each other, and not around a ring


@dataclass(frozen=True)
class LinkCost:
    """What a link costs. alpha_seconds: what a message takes however short it is. bytes_per_second: of one rank,
    each way, when all ranks of the group send at once."""

    alpha_seconds: float
    bytes_per_second: float


class Collective(NamedTuple):
    """`calls` equal collectives of `payload_bytes` each, in a group of `group_size` ranks. Payload: as in the ledger.

    op: a collective that the ledger knows. group: "dp", "tp" or "world".
    """

    op: str
    group: str
    group_size: int
    payload_bytes: int
    calls: int = 1


def hops(op: str, group_size: int, latency: str = "ring") -> int:
    """Return how many messages, one after the other, a collective among `group_size` ranks takes.

    latency: "ring", n - 1 of them, an all-reduce twice that; "tree", the logarithm of n to base 2,
    rounded up, in place of n - 1, as recursive doubling and NCCL's trees do. The bytes are those
    of the ring in either case.
    Raises ValueError for an unknown collective or latency.
    """
    if op not in CHUNKS_SENT or latency not in LATENCIES:
        known = f"{', '.join(CHUNKS_SENT)}; {', '.join(LATENCIES)}"
        raise ValueError(f"no cost for {op!r} by {latency!r}; known: {known}.")
    once = group_size - 1 if latency == "ring" else math.ceil(math.log2(group_size))
    return CHUNKS_SENT[op] * once


def collective_seconds(collective: Collective, link: LinkCost, latency: str = "ring") -> float:
    """Return seconds for all calls of one collective over one link; none in a group of one rank."""
    if collective.group_size == 1:
        return 0.0
    sent = ring_bytes(collective.op, collective.payload_bytes, collective.group_size)
    waiting = hops(collective.op, collective.group_size, latency) * link.alpha_seconds
    return collective.calls * (waiting + sent / link.bytes_per_second)


def step_seconds(
    computation_seconds: float,
    collectives: Iterable[Collective | Sequence],
    link_by_group: Mapping[str, LinkCost],
    latency: str = "ring",
) -> float:
    """Return seconds of one step.

    collectives: those of one rank, as Collective or (op, group, group_size, payload_bytes, calls).
    link_by_group: the link of "dp", of "tp", and of "world", which without one of its own runs over
    that of "dp".
    Raises ValueError for a group that has no link.
    """
    seconds = computation_seconds
    for row in collectives:
        collective = Collective(*row)
        group = collective.group
        link = link_by_group.get(group) or link_by_group.get("dp" if group == "world" else "")
        if link is None:
            raise ValueError(f"group {group!r} has no link; only {[*link_by_group]} have one.")
        seconds += collective_seconds(collective, link, latency)
    return seconds


def collectives_of(ledger: Ledger, sizes: Mapping[str, int]) -> list[Collective]:
    """Return a ledger's rows, a prediction's for instance, as collectives. sizes: ranks of "dp", "tp" and "world".

    The calls of a row are taken as equal, which their sums are indifferent to.
    """
    return [
        Collective(entry.op, entry.group, sizes[entry.group], traffic.payload_bytes // traffic.calls, traffic.calls)
        for entry, traffic in ledger
    ]


def demand(ledger: Ledger, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return what a step asks of the link, per rank: messages one after the other, and bytes by pattern.

    sizes: ranks of every group. "exchange_bytes" go straight to others, as the book's engine does reduce-scatters and
    all-to-alls on gloo, "ring_bytes" around a ring. (On NCCL, which `every_rank` plans, reduce-scatters are rings.)
    """
    exchanged = sum(ledger.total(op=op).sent_bytes for op in ("reduce_scatter", "all_to_all"))
    return {
        "messages": sum(traffic.calls * hops(entry.op, sizes[entry.group]) for entry, traffic in ledger),
        "ring_bytes": ledger.total().sent_bytes - exchanged,
        "exchange_bytes": exchanged,
    }
