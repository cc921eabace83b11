"""Files of checkpoints: opened only where they lie themselves, in the folder that was asked for."""

from __future__ import annotations

import hashlib
import os
import stat
from io import BufferedReader
from pathlib import Path


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
