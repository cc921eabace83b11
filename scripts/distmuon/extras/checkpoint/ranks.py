"""What all ranks do together in saving and loading: fail alike, or hear what rank 0 has found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist

from distmuon.extras.checkpoint.files import CheckpointError, in_words

Result = TypeVar("Result")


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Let whatever is raised inside be a CheckpointError: a file system's refusal, a damaged file, no memory."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {in_words(error)}.") from error


def raise_together(act: Callable[[], Result]) -> Result:
    """Return what `act` returns; where any rank raises, all raise CheckpointError with the first one's words."""
    if not several():
        with refusing():
            return act()
    result, words = None, None
    try:
        with refusing():
            result = act()
    except CheckpointError as error:
        words = str(error)
    everybody: list[str | None] = [None] * ranks()
    dist.all_gather_object(everybody, words)
    if said := [theirs for theirs in everybody if theirs is not None]:
        raise CheckpointError(said[0])
    return result  # type: ignore[return-value]


def on_rank_0(act: Callable[[], Result]) -> Result:
    """Let rank 0 act; return to all ranks what it got."""
    result = raise_together(lambda: act() if rank() == 0 else None)
    if not several():
        return result  # type: ignore[return-value]
    found = [result]
    dist.broadcast_object_list(found, src=0)
    return found[0]  # type: ignore[return-value]


def several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if several() else 0


def ranks() -> int:
    return dist.get_world_size() if several() else 1
