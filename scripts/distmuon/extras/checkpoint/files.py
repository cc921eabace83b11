"""Files of checkpoints: opened only where they lie themselves, in the folder that was asked for; and locks on names."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # what a file system without them answers


class CheckpointError(ValueError):
    """A checkpoint cannot be saved there, or is not to be believed. Raised on every rank, before anything changes."""


def in_words(error: BaseException) -> str:
    """Return what an error says as a part of a sentence: one line, without its full stop."""
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")


def place(folder: str | Path) -> Path:
    """Return a folder as a path, with ~ made the home that a shell would make of it."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: {error}; write the path out.") from None


def open_plain(file: Path) -> BufferedReader:
    """Open a file for reading. Raises CheckpointError for a link, which may lead anywhere, and for what is no file."""
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; take another checkpoint.") from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{file} is a link or no plain file; put the file itself into the folder.")
    return os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def sha256(file: Path) -> str:
    """Return the digest of a file's bytes."""
    with open_plain(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(folder: Path) -> None:
    """Let a folder's list of names be on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Lock:
    """One process at a time: a lock on a file, held until `release`, or until this process ends, however it ends.

    The file says who holds it. It is removed when the lock is given back; what a killed process has left is an unlocked
    file, and the next one takes it over. A file system that has no locks (some that are mounted over a network) gives
    one to everybody. Raises CheckpointError where another process holds it, or this one, in the words of `taken`, given
    who that is.
    """

    def __init__(self, file: Path, taken: Callable[[str], str]) -> None:
        self.file = file
        while True:
            self._handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(self._handle, 200).decode(errors="replace") or "another process"
                os.close(self._handle)
                raise CheckpointError(taken(holder)) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    os.close(self._handle)
                    raise
            if self._is_there():
                break
            os.close(self._handle)  # who held it has removed the file between the two calls
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Give the lock back, once; the file goes first, so that nobody waits for one that is about to vanish."""
        if self._handle >= 0:
            self.file.unlink(missing_ok=True)
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
