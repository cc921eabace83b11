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
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from distmuon.sharding.ledger import OPERATORS, WITHOUT_PAYLOAD

ITEM_BYTES = {"double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "unsigned char": 1}

# the payload as the ledger defines it, by the name of c10d's argument -> which input of the record that is
INPUTS = {"tensors": 0, "output_tensor": 0, "input_tensor": 1, "input": 1}


class Seen(NamedTuple):
    """One kind of collective in a trace."""

    calls: int
    payload_bytes: int


def count_once(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return {collective: payload bytes} of a trace with `record_shapes=True`, each counted once.

    events: of one rank, as in the trace's "traceEvents". An operator that takes a list of tensors
    does not say of what dtype they are; the annotation of its backend does, which has the same
    dimensions. Raises ValueError on an operator that it does not know, and where that dtype is
    missing or ambiguous: a silent gap would make every count worthless.
    """
    bytes_of: dict[str, int] = {}
    notes = [e for e in events if e.get("name", "").startswith(("gloo:", "nccl:"))]
    for event in filter(_is_operator, events):
        collective, argument = OPERATORS.get(event["name"], ("", ""))
        if argument not in INPUTS:
            name = event["name"]
            raise ValueError(f"{name} is a collective that this reader does not know; teach it.")
        dims, dtype = (event["args"][key][INPUTS[argument]] for key in ("Input Dims", "Input type"))
        if dtype == "TensorList":
            (dims,) = dims  # each of our calls has one tensor
            carried = {e["args"]["Input type"][0] for e in notes if _carries(e, collective, dims)}
            if len(carried) != 1:
                which = f"{len(carried)} dtypes" if carried else "no dtype"
                raise ValueError(f"gloo and nccl annotate {which} for the {collective} of {dims}.")
            (dtype,) = carried
        bytes_of[collective] = bytes_of.get(collective, 0) + math.prod(dims) * ITEM_BYTES[dtype]
    return bytes_of


def seen(events: Sequence[Mapping[str, Any]]) -> dict[str, Seen]:
    """Return what a trace says of each kind of collective."""
    calls = Counter(OPERATORS[event["name"]][0] for event in filter(_is_operator, events))
    return {collective: Seen(calls[collective], size) for collective, size in count_once(events).items()}


def _is_operator(event: Mapping[str, Any]) -> bool:
    name = event.get("name", "")
    ours = name.startswith("c10d::") and name not in WITHOUT_PAYLOAD
    return ours and event.get("cat") == "cpu_op"


def _carries(event: Mapping[str, Any], collective: str, dims: Sequence[int]) -> bool:
    name = event["name"].split(" ")[0]  # nccl adds from whom and to whom: "nccl:send 0->1"
    named = name in (f"gloo:{collective}", f"nccl:{collective}")
    # nccl's shadow on the GPU has no shapes
    return named and event.get("args", {}).get("Input Dims") == [dims]


# ---- Making such a trace ----------------------------------------------------------------------------------


@contextmanager
def exported(cuda: bool = False) -> Iterator[dict[str, Any]]:
    """Profile what happens inside, shapes included; the dict then holds the trace as the profiler exports it."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before its first start: it tells standard error of each
    trace: dict[str, Any] = {}
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    profiler = profile(activities=activities, record_shapes=True)  # acc_events=True would make of each event an object
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # torch 2.11, even of the first cycle
        profiler.start()
    try:
        yield trace
    finally:
        profiler.stop()
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace.update(json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def profiled() -> Iterator[list[dict[str, Any]]]:
    """Profile what happens inside; the list then holds the trace's events."""
    events: list[dict[str, Any]] = []
    with exported() as trace:
        yield events
    events += trace["traceEvents"]
