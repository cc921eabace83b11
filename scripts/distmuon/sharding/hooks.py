"""Hooks around the moves of a step: whoever wants to time or to weigh them need not change the optimizer.

with around_moves(lambda name: torch.profiler.record_function(name)):
    optimizer.step()
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])

_hooks: list[Callable[[str], AbstractContextManager[Any]]] = []


def hooked(method: Method) -> Method:
    """Mark a method as a move of the step: the hooks of `around_moves`, if any, are entered around every call."""

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as entered:
            for hook in _hooks:
                entered.enter_context(hook(method.__name__))
            return method(*args, **kwargs)

    return watched  # type: ignore[return-value]


@contextlib.contextmanager
def around_moves(hook: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter `hook(name)` around every move made in this process while this context is open."""
    _hooks.append(hook)
    try:
        yield
    finally:
        _hooks.remove(hook)
