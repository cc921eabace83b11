"""Traces made by hand, whose answers are known, for the tests of everything that reads or draws traces."""

from typing import Any

Event = dict[str, Any]
GROUP = {"Process Group Description": "dp", "Collective name": "all_gather"}


def event(cat: str, name: str, start: float, dur: float, tid: Any = 1, pid: Any = 0, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": dur, "args": args}


def kernel(name: str, start: float, dur: float, stream: int = 7) -> Event:
    return event("kernel", name, start, dur, stream)


def nccl(start: float, dur: float, stream: int = 7, ranks: str = "[0, 1]") -> Event:
    args = GROUP | {"Process Group Ranks": ranks}
    return event("kernel", "ncclDevKernel_AllGather_RING_LL", start, dur, stream, **args)


def trace(*events: Event, rank: int = 0) -> dict[str, Any]:
    return {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": list(events)}


def gloo(start: float, dur: float, rank: int, sequence: int, tid: int = 2, ranks: tuple[int, ...] = (0, 1)) -> Event:
    """Return one execution as `recording.merge` writes it."""
    args = {"Collective name": "all_gather", "Process Group Description": "dp", "Process Group Ranks": list(ranks),
            "Sequence": sequence, "Label": "momentum, bucket 0", "Bytes": 8}  # fmt: skip
    return event("user_annotation", "gloo:all_gather", start, dur, tid, rank, **args)


def merged(*ranks: list[Event]) -> dict[str, Any]:
    """Return a merged trace of these ranks' events; each has its step from 0 to 100 unless it brings its own."""
    events: list[Event] = []
    for rank, mine in enumerate(ranks):
        title = {"name": f"rank {rank} (dp {rank}, tp 0)"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": title})
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": 2, "args": {"name": "gloo dp"}})
        if not any(e["name"].startswith("step ") for e in mine):
            events.append(event("user_annotation", "step 0", 0, 100, 1, rank))
        events += mine
    return {"merged": True, "traceEvents": events}
