"""Process groups that carry out one collective after the other, as NCCL's do.

gloo keeps two threads per group and takes on two collectives at once. A clock cannot tell what a schedule gains by that
from what it gains by hiding work; so the race does without. torch has no public way to ask gloo for one thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

from torch.distributed import ProcessGroupGloo, distributed_c10d


class OneLane(ProcessGroupGloo):
    """gloo's group with one thread, on the interfaces that gloo would take."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = timeout, 1
        named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        devices = [ProcessGroupGloo.create_device(interface=name) for name in named]
        options._devices = devices or [ProcessGroupGloo.create_default_device()]
        super().__init__(store, rank, size, options)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Inside the block, every new group of gloo's is a `OneLane`."""
    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", OneLane):
        yield
