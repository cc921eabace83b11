"""One process at a time: a lock on a file, which the system takes back from a process that dies.

The file says who holds it. It is removed when the lock is given back; what a killed process has left is an unlocked
file, and the next one takes it over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

from distmuon.extras.checkpoint.files import CheckpointError

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # what a file system without them answers


class Lock:
    """Held from construction until `release`, or until this process ends, however it ends.

    A file system that has no locks (some that are mounted over a network) gives one to everybody. Raises
    CheckpointError where another process holds it, or this one, in the words of `taken`, given who that is.
    """

    def __init__(self, file: Path, taken: Callable[[str], str]) -> None:
        self.file = file
        while True:
            self._handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    holder = os.read(self._handle, 200).decode(errors="replace") or "another process"
                    os.close(self._handle)
                    if not isinstance(error, BlockingIOError):
                        raise
                    raise CheckpointError(taken(holder)) from None
            if self._is_there():
                break
            os.close(self._handle)  # who held it has removed the file between the two calls
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Give the lock back, once; the file goes first, so that nobody waits for one that is about to vanish."""
        if self._handle >= 0:
            with contextlib.suppress(FileNotFoundError):
                self.file.unlink()
            os.close(self._handle)
            self._handle = -1

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._handle), os.stat(self.file))
        except FileNotFoundError:
            return False


def is_free(file: Path) -> bool:
    """Return whether no process holds the lock; the file of one that was killed is removed."""
    try:
        Lock(file, str).release()
    except CheckpointError:
        return False
    return True
