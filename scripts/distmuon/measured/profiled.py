"""The profiler's count: collectives read out of a torch.profiler trace, each of them once.

torch.profiler writes down a collective several times. On gloo there is the operator that was called, `c10d::...`, on
the thread that called it, and an annotation `gloo:...` on the thread that carried it out; on NCCL there are
`record_param_comms`, `nccl:...` on the CPU and again on the GPU, and the kernel. Whoever sums all events whose name
sounds right counts everything several times over. Here the `c10d::` operators are counted, and nothing else.

No torch needed: a trace is JSON.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

ITEM_BYTES = {"double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "unsigned char": 1}

# operator -> (collective, which input is the payload as the ledger defines it)
OPERATORS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
}
SILENT = ("c10d::barrier", "c10d::monitored_barrier_")


class Seen(NamedTuple):
    """One kind of collective in a trace. calls: operators. payload_bytes: theirs. records: events that speak of it."""

    calls: int
    payload_bytes: int
    records: int


def count_once(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return {collective: payload bytes} of a trace made with `record_shapes=True`, every collective counted once.

    events: of one rank, as in the trace's "traceEvents". An operator that takes a list of tensors does not say of what
    dtype they are; the annotation of its backend does, which has the same dimensions.
    Raises ValueError on an operator that it does not know, because a silent gap would make every count worthless.
    """
    bytes_of: dict[str, int] = {}
    for event in filter(_is_operator, events):
        if event["name"] not in OPERATORS:
            raise ValueError(f"{event['name']} is a collective that this reader does not know; add it to OPERATORS.")
        collective, position = OPERATORS[event["name"]]
        dims, dtype = event["args"]["Input Dims"][position], event["args"]["Input type"][position]
        if dtype == "TensorList":
            (dims,) = dims  # each of our calls has one tensor
            dtype = next(e["args"]["Input type"][0] for e in events if _carries(e, collective, dims))
        bytes_of[collective] = bytes_of.get(collective, 0) + math.prod(dims) * ITEM_BYTES[dtype]
    return bytes_of


def seen(events: Sequence[Mapping[str, Any]]) -> dict[str, Seen]:
    """Return what a trace says of each kind of collective, and how many of its events have to do with it."""
    found = {}
    for collective, size in count_once(events).items():
        calls = sum(OPERATORS[event["name"]][0] == collective for event in filter(_is_operator, events))
        annotations = sum(event.get("name") == f"gloo:{collective}" for event in events)
        found[collective] = Seen(calls, size, calls + annotations)
    return found


def _is_operator(event: Mapping[str, Any]) -> bool:
    name = event.get("name", "")
    return event.get("cat") == "cpu_op" and name.startswith("c10d::") and name not in SILENT


def _carries(event: Mapping[str, Any], collective: str, dims: Sequence[int]) -> bool:
    return event.get("name") == f"gloo:{collective}" and event["args"]["Input Dims"] == [dims]


# ---- Making such a trace ----------------------------------------------------------------------------------


@contextmanager
def profiled() -> Iterator[list[dict[str, Any]]]:
    """Profile what happens inside; the list then holds the trace's events, shapes included."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its own start and stop are no news; read when first used
    events: list[dict[str, Any]] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield events
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events += json.load(file)["traceEvents"]
