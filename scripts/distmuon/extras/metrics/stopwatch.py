"""Where the time of a step goes: how much of it in communication, how much in Newton–Schulz.

On the CPU by the clock. On a GPU by events in the stream that computes: work is only asked for, and the clock would
time the asking. A collective that this stream waits for counts from the asking to the end of the waiting; what runs
beside the computation is hidden, and counts nothing. Waiting for slower ranks is communication, too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from distmuon.sharding.hooks import around_kinds

STEP = "step"  # all of it


class Stopwatch:
    """Times one step, from construction to `stop`, and all work of a kind in it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._spans = device.type == "cuda", list[tuple[str, Any, Any]]()
        self._open = contextlib.ExitStack()
        self._open.enter_context(self._span(STEP))
        self._open.enter_context(around_kinds(self._span))

    def stop(self) -> None:
        """End the step, finished or not; twice does no harm."""
        self._open.close()

    def seconds(self) -> dict[str, float]:
        """Return {STEP or kind: seconds}; a kind of which there was nothing is missing. Waits for a GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for kind, begin, end in self._spans:
            taken = begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
            found[kind] = found.get(kind, 0.0) + taken
        return found

    @contextlib.contextmanager
    def _span(self, kind: str) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self._spans.append((kind, begin, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
