"""Recording traces: one per rank with torch.profiler, the nine moves as named ranges, all ranks merged into one file.

    mine = record(world, train_step, 2, optimizer, trainer)
    ranks = world.gather(mine)
    if ranks is not None: save(merge(ranks), "out/trace.json.gz")   # open it in https://ui.perfetto.dev

Times: the profiler converts every rank's clock to that of the machine, so ranks of one machine can be compared, to
within microseconds; ranks of several machines cannot. `trace_report.clocks_disagree` holds the trace itself to that.
Recording takes time of its own, some microseconds per operator: a trace shows what happened when, not how fast.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from distmuon.launch import World
from distmuon.sharding.collectives import Flight
from muonbook.ch14.trace_trim import STEP, mark, merge, trim
from muonbook.measure.hooks import watched
from muonbook.measure.profiled import hush

__all__ = ["merge", "named_moves", "record", "save"]

GROUPS = ("dp", "tp", "world")


@contextmanager
def named_moves(optimizer: Any, trainer: Any = None, also: Mapping[str, str] | None = None) -> Iterator[None]:
    """Make a named range of each move, inside the block, and leave a mark of what the ledger is told.

    optimizer: one of ours; torch's have no moves. trainer: adds "forward_backward". also: further methods of the
    optimizer or its strategy, {method: name of its range}. Waiting for collectives that were started is a range "wait".
    """
    with ExitStack() as undo:
        undo.enter_context(watched([optimizer], record_function))
        for owner in (optimizer, getattr(optimizer, "strategy", None)):
            for method, name in (also or {}).items():
                _replace(undo, owner, method, partial(_in_range, name))
        _replace(undo, trainer, "forward_backward", partial(_in_range, "forward_backward"))
        _replace(undo, Flight, "wait", partial(_in_range, "wait"))
        _replace(undo, getattr(getattr(optimizer, "grid", None), "ledger", None), "record", _marked)
        yield


def _replace(undo: ExitStack, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Change a method of one object, or class, until `undo` closes; do nothing where there is none."""
    if (original := getattr(owner, name, None)) is None:
        return
    undo.callback(*((setattr, owner, name, original) if name in vars(owner) else (delattr, owner, name)))
    setattr(owner, name, change(original))


def _in_range(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return original(*args, **kwargs)

    return call


def _marked(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(op: str, group: str, group_size: int, payload_bytes: int, label: str, *rest: Any, **more: Any) -> Any:
        with record_function(mark(op, group, payload_bytes, label)):
            pass  # the collective follows at once; `trim` puts the two together
        return original(op, group, group_size, payload_bytes, label, *rest, **more)

    return call


def record(
    world: World, train_step: Callable[[], Any], steps: int, optimizer: Any = None, trainer: Any = None,
    also: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Call `train_step()` `steps` times under the profiler; return this rank's trace, trimmed. Collective.

    Each call is a range "step 0", "step 1", ...; all ranks enter the first one together. optimizer, trainer, also: see
    `named_moves`. Take a step before: the first one is never like the others.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device == "cuda")
    hush()
    profiler = profile(activities=activities, record_shapes=True)
    profiler.start()
    if world.size > 1:
        dist.barrier()
    with named_moves(optimizer, trainer, also):
        for number in range(steps):
            with record_function(f"{STEP}{number}"):
                train_step()
    if world.device == "cuda":
        torch.cuda.synchronize()
    profiler.stop()
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        exported = json.loads(Path(path).read_text(encoding="utf-8"))
    grid = getattr(optimizer, "grid", None)
    groups = {name: getattr(grid, name) for name in GROUPS if grid is not None}
    members = {
        name: dist.get_process_group_ranks(group.process_group) for name, group in groups.items() if group.size > 1
    }
    return trim(exported, world.rank, f"rank {world.rank} ({_place(world)})", members)


def _place(world: World) -> str:
    return f"dp {world.rank // world.tp}, tp {world.rank % world.tp}"


def save(trace: Mapping[str, Any], path: str | Path) -> None:
    """Write a trace, gzipped if `path` ends in .gz, making the folder; the same trace gives the same bytes."""
    path, text = Path(path), json.dumps(trace, separators=(",", ":"), ensure_ascii=False).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, 9, mtime=0) if path.suffix == ".gz" else text)
