"""Chapter 14's stored measurements as lines of text: what the page prints. Values come first, what they are after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muonbook.measure.trace import RankTrace
from muonbook.measure.trace_report import MS, length, meetings, range_times

Found = Mapping[str, Any]
PLACES = {"loopback": "loopback 2 x 1", "loopback_2x2": "loopback 2 x 2", "limited_link": "slow link 2 x 1"}
AT_MOST, AT_LEAST = 1.05, 1.2  # pipelined over synchronous on loopback; the inverse on the slow link


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
    """Return what naive and pipelined steps take over synchronous ones, and whether that meets what was wanted."""
    lines, medians = ["median  quartiles    rounds"], {}
    for place, title in PLACES.items():
        for schedule in ("naive", "pipelined"):
            row = found[place]["ratio_to_synchronous"][schedule]
            low, high = row["quartiles"]
            lines.append(f"{row['median']:6.2f}  {low:.2f} to {high:.2f}{row['count']:5}  {schedule}, {title}")
            medians[schedule, place] = row["median"]
    loopback = [medians["pipelined", place] <= AT_MOST for place in ("loopback", "loopback_2x2")]
    fast = 1 / medians["pipelined", "limited_link"] >= AT_LEAST
    lines += ["", f"pipelined, both loopbacks at most {AT_MOST}: {all(loopback)}"]
    return [*lines, f"pipelined, slow link at least {AT_LEAST} times as fast: {fast}"]


def owner_lines(found: Found) -> list[str]:
    """Return the same with one owner per matrix, on the slow link, by what is published and on which grid."""
    lines = ["naive  pipelined"]
    for place, race in found["limited_link_owner"].items():
        naive, ahead = (race["ratio_to_synchronous"][schedule]["median"] for schedule in ("naive", "pipelined"))
        lines.append(f"{naive:5.2f}{ahead:11.2f}  publishes {place} ranks")
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
    naive, ahead = (recorded[name]["overlap"] / recorded[name]["communication"] for name in compared)
    return [*lines, f"{naive:5.0%}{ahead:11.0%}  hidden under computation"]


def sending_lines(synchronous: Sequence[RankTrace]) -> list[str]:
    """Return how long a synchronous step's collectives are, over its Newton–Schulz: all, and the bucket groups'."""
    working = sum(range_times(rank)["newton_schulz"].host for rank in synchronous)
    lines = []
    for what, labels in (("all collectives", ("",)), ("those that a schedule can move", ("momentum", "parameters"))):
        sending = sum(
            length(c.when.interval for c in rank.collectives if c.label.startswith(labels)) for rank in synchronous
        )
        lines.append(f"{MS * sending / working:4.1f}  {what}")
    return lines


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


def ledger_lines(cost: Found) -> list[str]:
    """Return what the ledger costs, by the price of an entry and by steps with and without it."""
    row, (low, high) = cost["with_to_without"], cost["with_to_without"]["quartiles"]
    noise = "quartiles enclose 1: lost in noise" if low <= 1 <= high else "quartiles exclude 1: more than noise"
    return [
        f"{cost['share_of_step']:6.3%}  of a step: {cost['calls_per_step']} entries",
        f"{row['median']:6.3f}  steps with / without, {row['count']} rounds",
        f"        {low:.3f} to {high:.3f}; {noise}",
    ]
