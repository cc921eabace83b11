"""The moves of a step under the names that pictures and traces give them, in the order in which a step makes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from distmuon.sharding.hooks import around_moves

INNER = ("dp_gather", "tp_gather", "newton_schulz", "tp_shard", "dp_shard")  # of a strategy
MOVES = ("reduce_scatter", "norms", "adamw", "momentum", *INNER, "apply", "all_gather")
TITLES = {"check_and_clip": "norms", "step_adamw": "adamw"}  # what a picture calls them, where not by their name


def named_moves(hook: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Enter `hook(title)` around every move that optimizers of ours make in this process while the context is open."""
    return around_moves(lambda move: hook(TITLES.get(move, move)))
