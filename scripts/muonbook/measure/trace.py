"""Reading a trace: from the profiler's events to what a rank did, each thing once.

A collective appears in a trace four or five times, under names that all match: as the torch operator that issues it, as
the annotation around that, as the annotation's shadow on the GPU, as the kernel. Only one of them is its execution:

    NCCL    the kernel (cat "kernel", name "nccl...") on a stream; its arguments name the group's ranks
    gloo    the range "gloo:..." on one of gloo's threads; `ch14.recording` adds group, label and bytes to its arguments

Everything else on a GPU stream, copies and memsets included, is computation. On a CPU, computation is the operators of
the main thread, without those that call a collective.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distmuon.launch.cli import UsageError
from distmuon.optim import strategies
from distmuon.sharding.hooks import around_moves
from muonbook import jobs

Event = dict[str, Any]
STEP = "step "  # how the names of a recorded step's range begins
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVE = ("c10d::", "_c10d_functional::", "record_param_comms", "gloo:", "nccl:")  # how names of calls begin
MOVES = ("reduce_scatter", "norms", "adamw", "momentum", *strategies.MOVES, "apply", "all_gather")  # in order
TITLES = {"check_and_clip": "norms", "step_adamw": "adamw"}  # what a range is called, where not as the method
ENGINE = "autograd::engine"  # the engine at a node: hooks, and with them waiting, run in it as well


class Activity(NamedTuple):
    """Something that took time. lane: thread or stream. start, end: microseconds, on the clock of the whole trace."""

    name: str
    lane: str
    start: float
    end: float

    @property
    def interval(self) -> tuple[float, float]:
        return self.start, self.end


@dataclass(frozen=True)
class TracedCollective:
    """One execution of a collective on one rank.

    op: as the ledger names it, or else the profiler ("all_gather"). group: the global ranks in it; None where the
    profiler does not tell. queue: tells groups of the same ranks apart; sequence: place in that queue on this rank.
    name: the group's name, if it has one.
    label: what it is for, by the ledger; bytes: payload; both only in traces recorded by `ch14.recording`.
    """

    op: str
    when: Activity
    group: tuple[int, ...] | None = None
    queue: str = ""
    sequence: int = 0
    name: str = ""
    label: str = ""
    bytes: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What is the same for this collective on all ranks of its group, and for no other."""
        return self.group, self.queue, self.sequence


@dataclass
class RankTrace:
    """What one rank did.

    device: "gpu" or "cpu": where its work was looked for. ranges: named ranges of the host. shadows: the same on the
    GPU, from the first to the last kernel launched in them. by_name: (cat, name) -> durations of every event.
    """

    rank: int
    title: str
    device: str
    collectives: list[TracedCollective] = field(default_factory=list)
    computation: list[Activity] = field(default_factory=list)
    ranges: list[Activity] = field(default_factory=list)
    shadows: list[Activity] = field(default_factory=list)
    by_name: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    @property
    def place(self) -> tuple[int, int] | None:
        """DP rank and TP rank, where the title tells: "rank 3 (dp 1, tp 1)"."""
        told = re.search(r"dp (\d+), tp (\d+)", self.title)
        return (int(told[1]), int(told[2])) if told else None


def named_moves(hook: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Enter `hook(name)` around every move that optimizers of ours make in this process, by the names of `MOVES`."""
    return around_moves(lambda method: hook(TITLES.get(method, method)))


def load(path: str | Path) -> dict[str, Any]:
    """Return a trace file's JSON, plain or gzipped. Raises UsageError, in one sentence, for anything else."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        found = json.loads(text)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read ({error}); name a trace, .json or .json.gz.") from None
    except ValueError:
        raise UsageError(f"{path} is not JSON; name a trace that torch.profiler exported, whole.") from None
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UsageError(f"{path} is JSON, but no trace: it has no list of traceEvents.")
    return found


def read(path: str | Path) -> list[RankTrace]:
    """Return what every rank in a trace file did, in rank order. Errors as for `load`."""
    found = load(path)
    try:
        return parse(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: a malformed event ({type(error).__name__}: {error}); export it again.") from None


def save(trace: Mapping[str, Any], path: str | Path) -> None:
    """Write a trace, gzipped if `path` ends in .gz, making the folder; the same trace gives the same bytes."""
    path, text = Path(path), jobs.to_json(trace, separators=(",", ":")).encode()
    content = gzip.compress(text, 9, mtime=0) if path.suffix == ".gz" else text
    jobs.write_file("--traces", path, lambda file: file.write_bytes(content))


def parse(trace: dict[str, Any]) -> list[RankTrace]:
    """Return what every rank in a loaded trace did: one per process of a merged trace, else one."""
    origin = trace.get("baseTimeNanoseconds", 0) / 1e3
    events = [_moved(event, origin) for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    names = {e["pid"]: e["args"]["name"] for e in _named(trace, "process_name")}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in _named(trace, "thread_name")}
    if not trace.get("merged"):
        rank = (trace.get("distributedInfo") or {}).get("rank", 0)
        return [_parse_rank(rank, f"rank {rank}", events, threads)]
    return [
        _parse_rank(pid, names[pid], [event for event in events if event["pid"] == pid], threads)
        for pid in sorted(names)
    ]


def _named(trace: dict[str, Any], what: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event.get("ph") == "M" and event.get("name") == what]


def _moved(event: Event, origin: float) -> Event:
    return event | {"ts": event["ts"] + origin}


def _parse_rank(rank: int, title: str, events: Sequence[Event], threads: dict[tuple[Any, Any], str]) -> RankTrace:
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        by_name[event.get("cat", ""), event["name"]].append(event["dur"])
    work = [event for event in events if event.get("cat") in GPU_WORK]
    found = RankTrace(rank, title, "gpu" if work else "cpu", by_name=dict(by_name))
    found.shadows = [_activity(e, _lane(e, threads)) for e in events if e.get("cat") == "gpu_user_annotation"]
    found.ranges = [_activity(event, _lane(event, threads)) for event in named_ranges(events)]
    if work:
        sending = [event for event in work if is_nccl(event)] or gloo_ranges(events)
        found.computation = [_activity(event, _lane(event, threads)) for event in work if not is_nccl(event)]
    else:
        sending = gloo_ranges(events)
        found.computation = [_activity(event, "main") for event in computing(_on_main_thread(events))]
    found.collectives = _numbered(sending, threads)
    return found


def _lane(event: Event, threads: dict[tuple[Any, Any], str]) -> str:
    kind = "thread" if event.get("cat") in ("cpu_op", "user_annotation") else "stream"
    return threads.get((event["pid"], event["tid"]), f"{kind} {event['tid']}")


def _activity(event: Event, lane: str) -> Activity:
    return Activity(event["name"], lane, event["ts"], event["ts"] + event["dur"])


def named_ranges(events: Iterable[Event]) -> list[Event]:
    """Return the ranges that somebody named, without those in which a backend carries out a collective."""
    return [e for e in events if e.get("cat") == "user_annotation" and not e["name"].startswith(("gloo:", "nccl:"))]


def gloo_ranges(events: Iterable[Event]) -> list[Event]:
    """Return the ranges in which gloo carried out a collective."""
    return [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("gloo:")]


def is_nccl(event: Event) -> bool:
    """Say whether an event of a GPU's stream is a collective: NCCL's kernel carries it out."""
    return event["name"].lower().startswith("nccl")


def computing(events: Iterable[Event]) -> list[Event]:
    """Return the outermost operators of one thread that neither are nor contain a call of a collective.

    An operator that contains one may be blocked in it; those it calls besides are computation again.
    """
    ordered = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda event: (event["ts"], -event["dur"]))
    open_: list[int] = []  # places, in `ordered`, of the operators inside which the present one was called
    calling: set[int] = set()
    for place, event in enumerate(ordered):
        while open_ and _end(ordered[open_[-1]]) <= event["ts"]:
            open_.pop()
        open_.append(place)
        if event["name"].startswith(COLLECTIVE):
            calling.update(open_)
    found: list[Event] = []
    for place, event in enumerate(ordered):
        inside = found and event["ts"] < _end(found[-1])
        if place not in calling and not inside and not event["name"].startswith(ENGINE):
            found.append(event)
    return found


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]


def _on_main_thread(events: Iterable[Event]) -> list[Event]:
    """Return the events of the thread that calls the most operators: gloo's threads call hardly any."""
    by_thread: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event["pid"], event["tid"]].append(event)
    return max(by_thread.values(), key=len, default=[])


def _numbered(sending: Iterable[Event], threads: dict[tuple[Any, Any], str]) -> list[TracedCollective]:
    """Return the collectives in the order in which they began, counted per group."""
    found: list[TracedCollective] = []
    seen: Counter[tuple[Any, str]] = Counter()
    for event in sorted(sending, key=lambda event: event["ts"]):
        args = event.get("args", {})
        ranks = args.get("Process Group Ranks")
        group = tuple(ast.literal_eval(ranks) if isinstance(ranks, str) else ranks) if ranks else None
        name = args.get("Process Group Description", "").replace("undefined", "")
        queue = args.get("Process Group Name", name)
        sequence = args.get("Sequence", seen[group, queue])
        seen[group, queue] += 1
        op = args.get("Collective name") or re.sub("^gloo:", "", event["name"])
        found.append(
            TracedCollective(
                op.strip("_"), _activity(event, _lane(event, threads)), group, queue, sequence, name,
                args.get("Label", ""), args.get("Bytes"),
            )
        )  # fmt: skip
    return found
