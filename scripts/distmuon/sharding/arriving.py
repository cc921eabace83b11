"""Parameters that are still under way when a step returns, and arrive under the next forward pass.

While its bucket is under way, a parameter is of a class whose `__torch_function__` waits for it before anything reads
or writes it, and then makes it what it was. torch's own UninitializedParameter becomes a Parameter in the same way. So
a forward pass waits for one layer after the other, and whoever reads a parameter by hand gets the new values.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from distmuon.sharding.collectives import PendingWork
from distmuon.sharding.layout import Bucket

# what may be asked of a parameter, and done with its gradient, without its values
_ASKED = (
    "shape dtype device layout ndim nbytes itemsize is_leaf is_cuda is_sparse is_nested is_meta is_quantized _version"
)
_GRADIENTS = "grad grad_fn grad_dtype requires_grad"
_METHODS = "size dim numel stride is_contiguous element_size is_floating_point is_complex requires_grad_"
_HOOKS = "register_hook register_post_accumulate_grad_hook"
NEEDS_NO_VALUES = {
    *(getattr(Tensor, name).__get__ for name in f"{_ASKED} {_GRADIENTS}".split()),
    *(getattr(Tensor, name).__set__ for name in ("grad", "grad_dtype", "requires_grad")),
    *(getattr(Tensor, name) for name in f"{_METHODS} {_HOOKS}".split()),
}


class Arrival:
    """A bucket's parameters, which a collective fills that was started. The first use of one of them waits for all."""

    def __init__(self, bucket: Bucket, pending: PendingWork, parameters: Iterable[Tensor]) -> None:
        self.bucket, self.pending, self._lock = bucket, pending, threading.Lock()
        self._classes = [(p, type(p)) for p in parameters]
        for p, kind in self._classes:
            p.arrival = self  # type: ignore[attr-defined]
            p.__class__ = _arriving(kind)
        with _CHANGES:
            _UNDER_WAY.add(self)
            if not _WATCHING:
                _WATCHING.append(register_module_forward_pre_hook(_before_a_module))

    def wait(self) -> None:
        """Return when the parameters are there; they are ordinary ones then. Raises RuntimeError if a rank is lost."""
        with self._lock:
            self.pending.wait()
            while self._classes:
                p, kind = self._classes.pop()
                p.__class__ = kind
                del p.arrival  # type: ignore[attr-defined]
        with _CHANGES:
            _UNDER_WAY.discard(self)
            while _WATCHING and not _UNDER_WAY:
                _WATCHING.pop().remove()


# What is under way, and the hook that is there as long as something is. Weakly, or what is dropped before it arrives
# would live on.
_UNDER_WAY: weakref.WeakSet[Arrival] = weakref.WeakSet()
_WATCHING: list[RemovableHandle] = []
_CHANGES = threading.Lock()


def _before_a_module(module: nn.Module, _: Any) -> None:
    """Wait for the parameters of a traced or scripted module: inside it no Python function says what it reads."""
    if isinstance(module, torch.jit.ScriptModule):
        _wait_for(module.parameters())


def _wait_for(values: Iterable[Any]) -> None:
    for value in values:
        if arrival := getattr(value, "arrival", None):
            arrival.wait()


@functools.cache
def _arriving(kind: type[Tensor]) -> type[Tensor]:
    """Return the class of parameters of this kind that are under way."""
    words = {"__torch_function__": classmethod(_wait_first), "__deepcopy__": _copied, "__reduce_ex__": _reduced}
    return type(kind)(f"Arriving{kind.__name__}", (kind,), words)  # type: ignore[misc]  # by its own metaclass


def _copied(parameter: Any, memo: dict[int, Any]) -> Any:
    parameter.arrival.wait()  # before torch asks for the class of what it copies
    return copy.deepcopy(parameter, memo)


def _reduced(parameter: Any, protocol: Any) -> Any:
    parameter.arrival.wait()
    return parameter.__reduce_ex__(protocol)


def _wait_first(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func in NEEDS_NO_VALUES:
        return nn.Parameter.__torch_function__(func, types, args, kwargs)
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a compiled forward pass cannot wait for parameters one by one; call the optimizer's "
            "wait_for_parameters() before it, or make the optimizer with overlap_forward=False."
        )
    _wait_for(tree_iter((args, kwargs)))
    return func(*args, **kwargs)
