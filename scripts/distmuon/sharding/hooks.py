"""Hooks around what a step is made of: whoever wants to time or to weigh it need not change the optimizer.

with around_moves(lambda name: torch.profiler.record_function(name)):
    optimizer.step()

Moves are an optimizer's own, one after the other. Kinds cut across them: whatever communicates, whatever runs
Newton–Schulz, in any optimizer. `around_kinds` enters its hook around those.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Hook = Callable[[str], AbstractContextManager[Any]]

COMMUNICATION, NEWTON_SCHULZ = "communication", "newton_schulz"  # the kinds

_around_moves: list[Hook] = []
_around_kinds: list[Hook] = []


def hooked(method: Function) -> Function:
    """Mark a method as a move of the step: the hooks of `around_moves`, if any, are entered around every call."""
    return _watched(method, method.__name__, _around_moves)


def of_kind(kind: str) -> Callable[[Function], Function]:
    """Mark a function as work of this kind, which calls no other such: `around_kinds` enters its hooks around it."""
    return lambda function: _watched(function, kind, _around_kinds)


def around_moves(hook: Hook) -> AbstractContextManager[None]:
    """Enter `hook(name)` around every move made in this process while this context is open."""
    return _entered(_around_moves, hook)


def around_kinds(hook: Hook) -> AbstractContextManager[None]:
    """Enter `hook(kind)` around all work of a kind that is done in this process while this context is open."""
    return _entered(_around_kinds, hook)


def _watched(function: Function, name: str, hooks: list[Hook]) -> Function:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as entered:
            for hook in hooks:
                entered.enter_context(hook(name))
            return function(*args, **kwargs)

    return watched  # type: ignore[return-value]


@contextlib.contextmanager
def _entered(hooks: list[Hook], hook: Hook) -> Iterator[None]:
    hooks.append(hook)
    try:
        yield
    finally:
        hooks.remove(hook)
