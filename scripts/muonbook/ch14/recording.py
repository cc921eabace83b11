"""Recording traces: one per rank with torch.profiler, the nine moves as named ranges, all ranks merged into one file.

    mine = record(world, train_step, 2, grid)
    ranks = world.gather(mine)
    if ranks is not None: trace.save(merge(ranks), "out/trace.json.gz")   # open it in https://ui.perfetto.dev

Times: the profiler converts every rank's clock to that of the machine, so ranks of one machine can be compared, to
within microseconds; ranks of several machines cannot. `trace_report.clocks_disagree` holds the trace itself to that.
Recording takes time of its own, some microseconds per operator: a trace shows what happened when, not how fast.

The profiler does not say to which group a range "gloo:all_gather" belongs: it runs on one of the two threads that gloo
keeps per group. But the ledger is told just before every collective of ours, which leaves a mark, each group works its
queue in order, and messages have sizes: only one way to deal the threads out to the groups explains them all.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.parse import quote, unquote

import torch
import torch.distributed as dist
from torch.profiler import record_function

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from muonbook.measure.profiler import exported
from muonbook.measure.trace import (
    GPU_WORK,
    STEP,
    Event,
    computing,
    gloo_ranges,
    is_nccl,
    named_moves,
    named_ranges,
    parse,
)
from muonbook.measure.trace_report import hull

MARK = "ledger "  # how the names of marks begin
ABOUT = (
    "Recorded by torch.profiler, which takes time itself. Processes are ranks of one machine, on its clock; ts and dur "
    "are microseconds, ts from the first event. A collective's arguments name its group, the ranks in it, what it is "
    "for and its payload in bytes."
)
MAIN, STREAMS = 1, 100  # thread numbers in a merged trace; gloo's are 2, 3, ..., stream 7 is 107


# ---- Recording --------------------------------------------------------------------------------------------


def record(world: World, train_step: Callable[[], Any], steps: int, grid: Grid | None = None) -> dict[str, Any]:
    """Call `train_step()` `steps` times under the profiler; return this rank's trace, trimmed. Collective.

    Each call is a range "step 0", "step 1", ...; all ranks enter the first one together. So is each move of our
    optimizers, each forward and backward of a `trainers.Trainer`, and waiting for collectives that were started.
    grid: whose ledger tells what a collective is for. Take a step before: the first one is never like the others.
    """
    on_gpu = world.device == "cuda"
    with exported(cuda=on_gpu) as trace:
        if world.size > 1:
            dist.barrier()
        with named_moves(record_function), _marks(grid.ledger) if grid is not None else nullcontext():
            for number in range(steps):
                with record_function(f"{STEP}{number}"):
                    train_step()
        if on_gpu:
            torch.cuda.synchronize()
    groups = [] if grid is None else [group for group in (grid.dp, grid.tp, grid.world) if group.size > 1]
    members = {group.name: dist.get_process_group_ranks(group.process_group) for group in groups}
    place = f"dp {world.rank // world.tp}, tp {world.rank % world.tp}"
    return trim(trace, world.rank, f"rank {world.rank} ({place})", members)


@contextmanager
def _marks(ledger: Ledger) -> Iterator[None]:
    """Inside the block, leave a mark of whatever the ledger is told."""
    record = ledger.record

    def mark_and_record(op: str, group: str, size: int, payload_bytes: int, label: str, **more: Any) -> None:
        with record_function(mark(op, group, payload_bytes, label)):
            pass  # the collective follows at once; `trim` puts the two together
        record(op, group, size, payload_bytes, label, **more)

    ledger.record = mark_and_record  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del ledger.record  # the class's own method shows again


def mark(op: str, group: str, payload_bytes: int, label: str) -> str:
    """Return the name of the range that says what the collective after it is for."""
    return MARK + quote(json.dumps([op, group, payload_bytes, label]))  # the profiler writes names without escaping


# ---- One rank's trace made small, several ranks' made one ------------------------------------------------


def trim(trace: dict[str, Any], rank: int, title: str, groups: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return one rank's trace with what belongs to its steps, as plain events that `merge` can put beside others.

    trace: as exported by the profiler. groups: name -> global ranks in it. Kept are named ranges, the outermost
    operators, collectives (their issue and their execution, both with group, ranks, sequence, label and bytes), and
    the GPU's work.
    Times are microseconds, on the machine's clock. Raises ValueError where there is no range "step 0".
    """
    origin = trace.get("baseTimeNanoseconds", 0) / 1e3
    timed = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    steps = [event for event in named_ranges(timed) if event["name"].startswith(STEP)]
    if not steps:
        raise ValueError('the trace has no range "step 0": record it with recording.record.')
    began, main = min(step["ts"] for step in steps), steps[0]["tid"]
    timed = [event for event in timed if event["ts"] >= began]
    marks = [event for event in timed if event["name"].startswith(MARK)]
    gloo = sorted(gloo_ranges(timed), key=lambda event: event["ts"])
    executions = [event | {"sizes": _sizes(event)} for event in gloo]
    issues = [event for event in timed if event.get("cat") == "cpu_op" and event["name"].startswith("c10d::")]
    asked = _asked(marks, issues)
    threads = _deal_out(asked, executions)
    on_main = [event for event in timed if event["tid"] == main]
    ranges = [event for event in named_ranges(on_main) if not event["name"].startswith(MARK)]
    kept = [_event(event, "cpu_op", MAIN, "Input Dims") for event in computing(on_main)]
    kept += [_issued(request, groups) for wanted in asked.values() for request in wanted]
    kept += [_event(event, "user_annotation", MAIN) for event in ranges]
    names, lanes = {MAIN: "main"}, dict[Any, int]()
    for tid in sorted(threads, key=lambda tid: (threads[tid], next(e["ts"] for e in executions if e["tid"] == tid))):
        lanes[tid] = MAIN + 1 + len(lanes)
        names[lanes[tid]] = _thread_name(threads[tid], groups)
    for group, wanted in asked.items():
        for event, request in _paired(wanted, _queue(executions, threads, group)):
            kept.append(_executed(event, request, lanes[event["tid"]], groups.get(group)))
    open_ = {group: iter(wanted) for group, wanted in asked.items()}
    for event in sorted(timed, key=lambda event: event["ts"]):
        if event.get("cat") in (*GPU_WORK, "gpu_user_annotation"):
            if event["cat"] in GPU_WORK and is_nccl(event):
                event = _carried_out(event, open_, groups)
            kept.append(event | {"tid": STREAMS + event["tid"]})
            names[STREAMS + event["tid"]] = f"stream {event['tid']}"
    events = [event | {"pid": rank, "ts": event["ts"] + origin} for event in kept]
    members = {name: list(ranks) for name, ranks in groups.items()}
    return {"rank": rank, "title": title, "threads": names, "groups": members, "events": events}


def span(merged: dict[str, Any]) -> float:
    """Return how long a recorded step took, from the first rank's start to the last one's end, in microseconds."""
    ranges = (activity for rank in parse(merged) for activity in rank.ranges)
    start, end = hull(activity.interval for activity in ranges if activity.name.startswith(STEP))
    return end - start


def merge(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one Chrome trace of what `trim` returned on every rank: ranks are processes, times begin at 0.

    Its "distributedInfo" lists all groups with their ranks, as the profiler's own does for one rank. The same traces
    give the same text: events are sorted, keys stand in one order, times are rounded to nanoseconds.
    """
    origin = min(event["ts"] for trace in traces for event in trace["events"])
    events: list[Event] = []
    timed: list[Event] = []
    for trace in sorted(traces, key=lambda trace: trace["rank"]):
        pid = trace["rank"]
        names = [("process_name", 0, {"name": trace["title"]}), ("process_sort_index", 0, {"sort_index": pid})]
        for tid, name in sorted(trace["threads"].items()):
            names += [("thread_name", tid, {"name": name}), ("thread_sort_index", tid, {"sort_index": tid})]
        events += [{"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args} for name, tid, args in names]
    for event in [event for trace in traces for event in trace["events"]]:
        timed.append(event | {"ts": round(event["ts"] - origin, 3), "dur": round(event["dur"], 3)})
    timed.sort(key=lambda e: (e["ts"], e["pid"], e["tid"], -e["dur"], e["name"]))
    keys = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
    ordered = [{key: event[key] for key in keys if key in event} for event in [*events, *timed]]
    groups = sorted({(name, tuple(ranks)) for trace in traces for name, ranks in trace["groups"].items()})
    world = {
        "world_size": len(traces),
        "pg_config": [{"pg_desc": name, "pg_size": len(ranks), "ranks": list(ranks)} for name, ranks in groups],
    }
    about = {"schemaVersion": 1, "displayTimeUnit": "ms", "merged": True, "about": ABOUT, "distributedInfo": world}
    return about | {"traceEvents": ordered}


def _event(event: Event, category: str, tid: int, *arguments: str) -> Event:
    kept = {name: event["args"][name] for name in arguments if name in event.get("args", {})}
    found = {"ph": "X", "cat": category, "name": event["name"], "tid": tid, "ts": event["ts"], "dur": event["dur"]}
    return found | {"args": kept} if kept else found


def _thread_name(group: str, groups: Mapping[str, Sequence[int]]) -> str:
    """Return the name of a thread of gloo's: its group, and the ranks that meet there."""
    return f"gloo {group}: ranks {', '.join(map(str, groups[group]))}" if group in groups else f"gloo {group}".strip()


def _issued(request: Event, groups: Mapping[str, Sequence[int]]) -> Event:
    """Return the call of a collective on the main thread, with what it asks for."""
    kept = _event(request["call"], "cpu_op", MAIN, "Input Dims")
    return kept | {"args": _about(request, groups.get(request["group"])) | kept.get("args", {})}


def _asked(marks: Sequence[Event], issues: Sequence[Event]) -> dict[str, list[Event]]:
    """Return, per group, what was asked of it: the issuing operator, with what the ledger was told, in order."""
    found: dict[str, list[Event]] = defaultdict(list)
    told: dict[Any, Sequence[Any]] = {}  # per thread, the latest mark that no operator has followed yet
    for event in sorted([*marks, *issues], key=lambda event: event["ts"]):
        if event["name"].startswith(MARK):
            told[event["tid"]] = json.loads(unquote(event["name"].removeprefix(MARK)))
        else:
            op, group, size, label = told.pop(event["tid"], (event["name"], "", None, ""))
            about = {"op": op, "group": group, "sequence": len(found[group]), "bytes": size, "label": label}
            found[group].append(about | {"call": event, "ts": event["ts"], "sizes": _sizes(event)})
    return dict(found)


def _sizes(event: Event) -> set[int]:
    """Return the numbers of elements of an event's inputs."""

    def flat(dims: Any) -> Iterator[int]:
        if dims and isinstance(dims[0], list):
            for part in dims:
                yield from flat(part)
        elif dims:
            yield math.prod(dims)

    return set(flat(event.get("args", {}).get("Input Dims", [])))


def _deal_out(asked: Mapping[str, Sequence[Event]], executions: Sequence[Event]) -> dict[Any, str]:
    """Return the group of every gloo thread: the way of dealing them out that explains most executions."""
    tids = sorted({event["tid"] for event in executions})
    best, most = dict.fromkeys(tids, ""), 0
    for choice in itertools.product(sorted(asked), repeat=len(tids)):
        threads = dict(zip(tids, choice, strict=True))
        pairs = [_paired(wanted, _queue(executions, threads, group)) for group, wanted in asked.items()]
        explained = sum(wanted is not None for paired in pairs for _, wanted in paired)
        if explained > most:
            best, most = threads, explained
    return best


def _queue(executions: Sequence[Event], threads: Mapping[Any, str], group: str) -> list[Event]:
    return [event for event in executions if threads[event["tid"]] == group]


def _paired(asked: Sequence[Event], queue: Sequence[Event]) -> list[tuple[Event, Event | None]]:
    """Return each execution, in the order in which they began, with the first request of its size not yet served.

    Two threads may begin two requests in the other order, microseconds apart; the size then tells which is which.
    """
    open_, found = list(asked), []
    for execution in queue:
        fits = (n for n, a in enumerate(open_) if a["ts"] <= execution["ts"] and a["sizes"] & execution["sizes"])
        number = next(fits, None)
        found.append((execution, None if number is None else open_.pop(number)))
    return found


def _executed(event: Event, wanted: Event | None, tid: int, ranks: Sequence[int] | None) -> Event:
    """Return an execution with what was asked for: group, sequence, label and bytes."""
    kept = _event(event, "user_annotation", tid, "Input Dims")
    return kept if wanted is None else kept | {"args": _about(wanted, ranks) | kept.get("args", {})}


def _carried_out(event: Event, open_: Mapping[str, Iterator[Event]], groups: Mapping[str, Sequence[int]]) -> Event:
    """Return NCCL's kernel with what was asked for. It names its group, and each group's run in the order of calls."""
    group = event.get("args", {}).get("Process Group Description", "")
    group = "world" if group == "default_pg" else group
    wanted = next(open_.get(group, iter(())), None)
    return event if wanted is None else event | {"args": event["args"] | _about(wanted, groups.get(group))}


def _about(wanted: Event, ranks: Sequence[int] | None) -> dict[str, Any]:
    args = {"Collective name": wanted["op"], "Process Group Description": wanted["group"],
            "Sequence": wanted["sequence"]}  # fmt: skip
    if ranks is not None:
        args["Process Group Ranks"] = list(ranks)
    if wanted["bytes"] is not None:
        args |= {"Label": wanted["label"], "Bytes": wanted["bytes"]}
    return args
