"""Chapter 14's stored measurements as lines of text: what the page prints. Values come first, what they are after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muonbook.measure.trace import RankTrace
from muonbook.measure.trace_report import meetings

Found = Mapping[str, Any]
PLACES = {"loopback": "loopback 2 x 1", "loopback_2x2": "loopback 2 x 2", "limited_link": "slow link 2 x 1"}


def waiting_lines(ranks: Sequence[RankTrace]) -> list[str]:
    """Return how each rank's time inside collectives divides, and which rank the others waited for most."""
    met = meetings(ranks)
    lines, caused = ["waiting  transfer"], dict[str, float]()
    for rank in ranks:
        waiting = sum(m.waiting.get(rank.rank, 0.0) for m in met)
        share = waiting / (waiting + sum(m.transfer.get(rank.rank, 0.0) for m in met))
        lines.append(f"{share:7.0%}{1 - share:10.0%}  {rank.title}")
        arrived_last = (m for m in met if max(m.arrivals.values()) == m.arrivals.get(rank.rank))
        caused[rank.title] = sum(sum(m.waiting.values()) for m in arrived_last)
    last = max(caused, key=lambda title: caused[title])
    return [*lines, f"{caused[last] / sum(caused.values()):7.0%} of all waiting is for {last}"]


def optimizer_lines(trace: Found) -> list[str]:
    """Return a public trace's optimizer, on host and GPU, over the time in which the GPU was busy."""
    rows = {
        "optimizer_cpu_ms": "on the host, launching",
        "optimizer_gpu_ms": "on the GPU, inside the optimizer's range",
        "optimizer_gpu_computing_ms": "in that range, computing",
    }
    return [f"{trace[key] / trace['busy_ms']:6.1%}  {what}" for key, what in rows.items()]


def gain_lines(found: Found) -> list[str]:
    """Return what naive and pipelined steps take over synchronous ones."""
    lines = ["median  quartiles    rounds"]
    for place, title in PLACES.items():
        for schedule in ("naive", "pipelined"):
            row = found[place]["ratio_to_synchronous"][schedule]
            low, high = row["quartiles"]
            lines.append(f"{row['median']:6.2f}  {low:.2f} to {high:.2f}{row['count']:5}  {schedule}, {title}")
    return lines


def recorded_lines(recorded: Found) -> list[str]:
    """Return what the recorded steps of naive and pipelined show, relative to those of the synchronous schedule."""
    rows = {
        "communication_sum": "collectives, durations summed",
        "communication": "the same, as a union",
        "span": "first start to last end",
    }
    lines, compared = ["naive  pipelined"], ("naive", "pipelined")
    for key, what in rows.items():
        naive, ahead = (recorded[name][key] / recorded["synchronous"][key] for name in compared)
        lines.append(f"{naive:5.2f}{ahead:11.2f}  {what}")
    naive, ahead = (recorded[name]["overlap"] / recorded[name]["computation"] for name in compared)
    return [*lines, f"{naive:5.0%}{ahead:11.0%}  of all computing runs under a collective"]


def asynchronous_lines(synchronous: Found, asynchronous: Found) -> list[str]:
    """Return what two public traces of a rank say, one over the other."""
    rows = {
        "communication_sum_ms": "NCCL kernels, durations summed",
        "communication_ms": "the same, as a union",
        "span_ms": "GPU, first start to last end",
    }
    lines = [f"{asynchronous[key] / synchronous[key]:5.2f}  {what}" for key, what in rows.items()]
    after, before = (trace["overlap_ms"] / trace["communication_ms"] for trace in (asynchronous, synchronous))
    return [*lines, f"{after:5.0%}  hidden under computation; before: {before:.0%}"]
