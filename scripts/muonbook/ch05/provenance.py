"""Where the values of a collective's result come from, measured: the same collective, run on "who am I" tensors.

A picture that colours every value by the rank it came from must not take a textbook's word for it. `with_origins` runs
the collective once for its result, and once per rank and element on tensors that are one there and zero elsewhere: an
element of the result that is not zero has that value in it. Nothing here imports matplotlib: every rank may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_origins(collective: Callable[[Any], Any], tensor: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Return (values, origins) of `collective(tensor)` on this rank, as nested lists that fit into JSON.

    collective: takes a tensor and returns what this rank holds afterwards; it must be linear (sums, means, copies), and
        every rank of the group calls this with the same one. It runs 1 + `size` times the tensor's length times, and a
        ledger counts them all.
    tensor: 1-D, equally long on all ranks, of a floating dtype or wide enough integers; it is not changed.
    rank, size: of the group. origins has the shape of values; each leaf lists the [rank, element] in the value.
    """
    every = [[source, element] for source in range(size) for element in range(len(tensor))]

    def mark(origin: list[int]) -> Any:
        marked = tensor * 0
        marked[origin[1]] = int(rank == origin[0])
        return collective(marked)

    values = collective(tensor.clone()).tolist()
    found = _collect([mark(origin).tolist() for origin in every])
    return values, [[every[n] for n in leaf] for leaf in found]


def _collect(marked: list[Any]) -> Any:
    """Return nested lists with, at each leaf, the positions in `marked` whose leaf is not zero."""
    if isinstance(marked[0], list):
        return [_collect(list(parts)) for parts in zip(*marked, strict=True)]
    return [source for source, mark in enumerate(marked) if mark != 0]
