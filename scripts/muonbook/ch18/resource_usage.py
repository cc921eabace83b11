"""What a process holds of the machine, as Linux counts it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

MB = 1 << 20


class Footprint(NamedTuple):
    """memory: MB in memory that stand for no file. files: open ones, sockets among them."""

    memory: float
    files: int

    @staticmethod
    def of(line: str) -> Footprint:
        """Return what was written as two words."""
        memory, files = line.split()
        return Footprint(float(memory), int(files))


def footprint(pid: int) -> Footprint:
    """Return what a running process holds; pages of files, such as those of torch's code, are left out."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return Footprint((resident - shared) * os.sysconf("SC_PAGE_SIZE") / MB, len(os.listdir(f"/proc/{pid}/fd")))
