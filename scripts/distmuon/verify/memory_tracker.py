"""Memory of the moment: what a piece of code holds beyond what was there, operator by operator, and at its worst."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from distmuon.verify.model_states import storage_of

COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of torch's operators
SETTLE = 0.005  # seconds: after a collective, a thread of gloo's still holds its tensors for some microseconds


class Moment(NamedTuple):
    """After one operator: the stage of the work it belonged to, and the bytes that the tracker then counted."""

    stage: str
    alive: int


class StorageTracker(TorchDispatchMode):
    """Context manager; `peak` is the largest sum of bytes of storages, born inside it, that were alive at one time.

    Every tensor that an operator returns inside the block is seen; a storage counts from its birth to its last
    reference, whoever holds it, and once, however many views it has, with its present size. What an operator allocates
    and frees within itself is not seen, nor is what a backend allocates.

    standing: storages that were there before. Where they are given, every other one counts from when an operator first
    takes or returns it: FSDP2 fills storages that it made empty, long ago.
    fakes: count tensors without data, for work that is weighed on them. Else they are left out: DTensor makes some on
    its own, the first time it meets a call, to learn the shape of a result.
    `history` has a Moment per operator; `during(stage)` says which stage it is.
    """

    def __init__(
        self,
        standing: Iterable[StorageWeakRef] | None = None,
        device: torch.device | None = None,
        *,
        fakes: bool = False,
    ) -> None:
        super().__init__()
        self.device, self._fakes = device, fakes
        self.peak, self.stage = 0, ""
        self.history: list[Moment] = []
        self._standing = None if standing is None else {ref.cdata: ref for ref in standing}
        self._alive: dict[int, StorageWeakRef] = {}
        self._settled = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # DTensor first: then this mode sees what it does with its parts
        if func.namespace in COLLECTIVES:
            self._settled = False
        elif not self._settled:
            time.sleep(SETTLE)
            self._settled = True
        given = _tensors((args, kwargs or {}))
        old = {storage_of(tensor)._cdata for tensor in given} if self._standing is None else self._standing
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result) + (given if self._standing is not None else []):
            if isinstance(tensor, FakeTensor) and not self._fakes:
                continue
            storage = storage_of(tensor)
            elsewhere = self.device is not None and storage.device != self.device
            if not elsewhere and storage._cdata not in old and storage._cdata not in self._alive:
                self._alive[storage._cdata] = StorageWeakRef(storage)
        sizes = {key: size_of(ref) for key, ref in self._alive.items()}
        self._alive = {key: ref for key, ref in self._alive.items() if sizes[key] is not None}
        alive = sum(size or 0 for size in sizes.values())
        self.history.append(Moment(self.stage, alive))
        self.peak = max(self.peak, alive)
        return result

    @contextlib.contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Count what happens inside as part of `stage`."""
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    def peaks(self) -> dict[str, int]:
        """Return the peak of every stage, in bytes."""
        worst: dict[str, int] = {}
        for stage, alive in self.history:
            worst[stage] = max(worst.get(stage, 0), alive)
        return worst


def references(tensors: Iterable[Tensor]) -> list[StorageWeakRef]:
    """Return a weak reference to each storage behind these tensors; a storage is not confused with a later one."""
    storages = {storage._cdata: storage for storage in map(storage_of, tensors)}
    return [StorageWeakRef(storage) for storage in storages.values()]


def size_of(reference: StorageWeakRef) -> int | None:
    """Return the bytes that the storage has now, or None where it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return None if storage is None else storage.nbytes()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
