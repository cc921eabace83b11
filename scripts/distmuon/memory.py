"""Transient memory: how much a piece of code allocates beyond what was there when it began, at its worst moment."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class StorageTracker(TorchDispatchMode):
    """Context manager; `peak` is the largest sum of bytes of storages, born inside it, that were alive at one time.

    Every tensor that an operator returns inside the block is seen; a storage counts from its birth to its last
    reference, whoever holds it, and once, however many views it has. What an operator allocates and frees within itself
    is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in _tensors(item)]
