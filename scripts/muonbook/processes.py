"""Processes and their parents: whom a process has started, and what becomes of them when it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def children(pid: int) -> list[int]:
    """Return the running processes whose parent is `pid`."""
    return [child for child, parent in _parents() if parent == pid]


def descendants(pid: int) -> list[int]:
    """Return every running process that descends from `pid`, parents before their children."""
    table, found = _parents(), [pid]
    for one in found:  # which grows
        found += [child for child, parent in table if parent == one]
    return found[1:]


def running() -> list[int]:
    """Return every running process."""
    return [pid for pid, _ in _parents()]


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let Linux send this process the signal when its parent has ended. Elsewhere nothing does."""
    _prctl(SET_PARENT_DEATH_SIGNAL, number)


def adopt_orphans() -> None:
    """Become on Linux the parent of every descendant whose own parent has ended, so that `descendants` finds it."""
    _prctl(SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _parents() -> list[tuple[int, int]]:
    """Return (process, its parent) of all that run; one that has ended and is only remembered is left out."""
    if not os.path.exists("/proc/self/stat"):  # macOS
        rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True).stdout
        return [(int(pid), int(parent)) for pid, parent, state in map(str.split, rows.splitlines()) if state[0] != "Z"]
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = stat.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):  # it has just gone
            continue
        if state != "Z":
            found.append((int(stat.parent.name), int(parent)))
    return found
