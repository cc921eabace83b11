"""The moves of a step, watched from outside: whoever wants to time or to weigh them need not change the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

OUTER = ("reduce_scatter", "gradients_agreed", "step_adamw", "momentum", "apply", "all_gather")  # of the optimizer
INNER = ("dp_gather", "tp_gather", "newton_schulz", "tp_shard", "dp_shard")  # of its strategy
TITLES = {"gradients_agreed": "norms", "step_adamw": "adamw"}  # what a picture calls them, where not by their name


@contextlib.contextmanager
def watched(optimizers: Iterable[object], around: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter `around(move)` around every move that these optimizers make while this context is open.

    Those of torch make none that it knows.
    """
    with contextlib.ExitStack() as undo:
        for optimizer in optimizers:
            strategy = getattr(optimizer, "strategy", None)
            for owner, name in [(optimizer, name) for name in OUTER] + [(strategy, name) for name in INNER]:
                if hasattr(owner, name):
                    setattr(owner, name, _inside(around, TITLES.get(name, name), getattr(owner, name)))
                    undo.callback(delattr, owner, name)  # the class's own method shows again
        yield


def _inside(
    around: Callable[[str], AbstractContextManager[Any]], move: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with around(move):
            return method(*args)

    return call
