"""Download one file: from mirrors, checked by SHA-256, kept whole or not at all.

`torch.hub.download_url_to_file` does it. Ours is what it leaves to its caller: to know a file that is here already, a
limit to waiting, the next mirror, and one sentence when nothing comes.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request

from distmuon.launch.cli import UsageError

LIMIT = 30.0  # seconds without a byte


def is_whole(path: Path, sha256: str) -> bool:
    """Say whether `path` is a file with this SHA-256 (64 lower-case hexadecimal digits)."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def fetch(addresses: Sequence[str], path: Path, sha256: str) -> bool:
    """Bring a file to `path`; return False if it was there already, whole, and nothing was asked for.

    addresses: mirrors, asked in this order. Raises UsageError when no address gave the file. What is at `path` is then
    what was there before.
    """
    from torch import hub

    if path.exists():
        if is_whole(path, sha256):
            return False
        print(f"{path.name}: here, but not the file known (its SHA-256 differs); fetching it again", flush=True)
    reasons = []
    for address in addresses:
        try:
            Request(address)  # raises where this is no address: torch.hub would leave an empty file behind
            path.parent.mkdir(parents=True, exist_ok=True)
            with _patience():
                hub.download_url_to_file(address, str(path), sha256, progress=sys.stderr.isatty())
            return True
        except (OSError, HTTPException, ValueError, RuntimeError) as error:
            reasons.append(f"{address}: {_reason(error)}")
    said = "; ".join(reasons)
    raise UsageError(f"{path.name} did not come ({said}); try again, or put the file at {path} by hand.")


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Let a server that falls silent be an error: torch.hub itself would wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(LIMIT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, RuntimeError):  # torch.hub's, and its only one
        return "what came is not the file known, its SHA-256 differs; nothing of it was kept"
    return str(getattr(error, "reason", None) or error)
