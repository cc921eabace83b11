"""Being asked to stop: SIGTERM, as schedulers send it before they take a machine away, Ctrl-C, a closed terminal.

    launch.run(train, dp=4, stop_within=30)     # seconds that the ranks get to save and return

    if world.asked_to_stop(): ...               # in a rank, between two steps; ranks hear of it apart: let them agree

The signal becomes a note, which a rank reads when it has time. `launch.command` then exits with 128 + its number, as
shells have it, so that whoever started the run knows that it is not finished.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from distmuon.launch.session import BURST

_asked: int | None = None  # the first signal's number


@contextlib.contextmanager
def install_handler(numbers: Sequence[int], patient: bool) -> Iterator[None]:
    """Note these signals while inside, instead of obeying them.

    patient: however often they come; else one that comes after the first one's burst is obeyed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change handlers
        return
    noted = time.monotonic()
    before = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, frame: Any) -> None:
        nonlocal noted
        if _asked is None:
            noted = time.monotonic()
            note(number)
        elif not patient and time.monotonic() - noted >= BURST:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def note(number: int) -> None:
    """Note that this signal has asked, if none has yet."""
    global _asked
    _asked = _asked or number


def reset() -> None:
    """Forget who has asked: another run begins in this process."""
    global _asked
    _asked = None


def should_stop() -> bool:
    """Say whether this process was asked to stop."""
    return _asked is not None


def exit_code() -> int:
    """Return 128 + the number of the signal that has asked, 0 if none has."""
    return 128 + _asked if _asked else 0
