"""The ledger: one row for every collective of ours, so that bytes are counted and never guessed.

Payload and sent bytes follow the ring algorithms (Patarasuk and Yuan 2009; Rabenseifner 2004). For a group
of n ranks, and chunks of ceil(payload / n) bytes:

    collective       payload                      this rank sends
    all_gather       the gathered output          (n - 1) chunks
    reduce_scatter   the input to be reduced      (n - 1) chunks
    all_to_all       the input to be exchanged    (n - 1) chunks, which go directly
    all_reduce       the tensor                   2 (n - 1) chunks
    broadcast        the tensor                   (n - 1) chunks, averaged over the ring

Where ranks hold or send unequal parts there is no such chunk, and whoever records says what this rank sends.
What really crosses a wire depends on the backend's algorithm and its protocol; the ledger counts the logical
payload, which is what layouts and strategies differ in. A prediction is a ledger too, filled without a process,
so "predicted equals counted" is `==` on two ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

CHUNKS_SENT = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2, "broadcast": 1}

# Whoever reads torch's collectives by their operators' names, at the dispatcher or in a trace, takes a name that is not
# here for an error: a silent gap would make every count worthless. c10d is what torch calls its library of them.
# Operator -> (collective, which argument holds the payload as the ledger defines it)
OPERATORS = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::send": ("send", "tensors"),  # no collective, and none of ours
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "returned"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
}
WITHOUT_PAYLOAD = {
    "c10d::barrier",
    "c10d::monitored_barrier_",
    "c10d::recv_",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}


def ring_bytes(op: str, payload_bytes: int, group_size: int) -> int:
    """Return the bytes one rank sends for one collective, by the ring formula."""
    if op not in CHUNKS_SENT:
        known = ", ".join(CHUNKS_SENT)
        raise ValueError(f"no ring formula for {op!r}; known collectives: {known}.")
    chunk = -(-payload_bytes // group_size)
    return CHUNKS_SENT[op] * (group_size - 1) * chunk


class Entry(NamedTuple):
    """What a row is about: the collective, the group it ran in ("dp", "tp" or "world"), and what for."""

    op: str
    group: str
    label: str


class Traffic(NamedTuple):
    """How much: calls, payload bytes and bytes this rank sends, summed over calls."""

    calls: int
    payload_bytes: int
    sent_bytes: int

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Traffic(0, 0, 0)


class Ledger:
    """Rows of (entry, traffic) of one rank, in order of first appearance."""

    def __init__(self) -> None:
        self._rows: dict[Entry, Traffic] = {}

    def record(
        self,
        op: str,
        group: str,
        group_size: int,
        payload_bytes: int,
        label: str,
        calls: int = 1,
        sent_bytes: int | None = None,
    ) -> None:
        """Add `calls` equal collectives; a group of one rank sends nothing and is not recorded.

        sent_bytes: of one call by this rank, where its part is not everybody's.
        """
        if group_size == 1:
            return
        entry = Entry(op, group, label)
        sent = ring_bytes(op, payload_bytes, group_size) if sent_bytes is None else sent_bytes
        self._rows[entry] = self._rows.get(entry, NOTHING).plus(Traffic(calls, calls * payload_bytes, calls * sent))

    def add(self, other: Ledger, times: int = 1) -> None:
        """Add every row of `other`, `times` times over: a step's prediction becomes a run's."""
        for entry, traffic in other:
            total = Traffic(*(times * value for value in traffic))
            self._rows[entry] = self._rows.get(entry, NOTHING).plus(total)

    def clear(self) -> None:
        self._rows.clear()

    def __iter__(self) -> Iterator[tuple[Entry, Traffic]]:
        return iter(self._rows.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and not self.differences(other)  # a row of nothing is no row

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Ledger({len(self._rows)} rows, {self.total().sent_bytes} bytes sent)"

    def total(self, **where: str) -> Traffic:
        """Return the sum of the rows whose entry matches, for instance `total(op="all_gather", group="dp")`."""
        total = NOTHING
        for entry, traffic in self:
            if all(getattr(entry, field) == value for field, value in where.items()):
                total = total.plus(traffic)
        return total

    def by_collective(self) -> dict[tuple[str, str], Traffic]:
        """Return traffic per (op, group), labels summed."""
        return {
            (op, group): self.total(op=op, group=group) for op, group in dict.fromkeys((e.op, e.group) for e, _ in self)
        }

    def differences(self, other: Ledger) -> list[str]:
        """Return one sentence for each row in which the two ledgers disagree; an empty list where they are equal."""
        entries = dict.fromkeys([*self._rows, *other._rows])
        return [
            f"{entry.op} over {entry.group} ({entry.label}): {mine} against {theirs}"
            for entry in entries
            if (mine := self._rows.get(entry, NOTHING)) != (theirs := other._rows.get(entry, NOTHING))
        ]
