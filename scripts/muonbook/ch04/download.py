"""Download one file: resumed after a cut, checked by SHA-256, kept whole or not at all.

Why neither scikit-learn's fetch_openml nor torch.hub, which are installed anyway: neither resumes, so that a cut at
160 of 170 MB costs all of them, and fetch_openml's parser for dense data wants pandas.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from distmuon.launch.arguments import UsageError

LIMIT = 30  # seconds without a byte
TRIES = 3  # in a row at one address, as long as each brings something
PIECE = 1 << 16  # bytes


def is_whole(path: Path, *sha256: str) -> bool:
    """Say whether `path` is a file with one of these SHA-256 (64 lower-case hexadecimal digits each)."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _sum(file) in sha256


def fetch(
    address: str | Sequence[str],
    path: Path,
    sha256: str,
    size: int | None = None,
    *,
    resume: bool = True,
    remedy: str | None = None,
) -> bool:
    """Bring a file to `path`; return False if it was there already, whole, and nothing was asked for.

    address: one, or several mirrors, asked in this order. A mirror goes on where the last one broke off.
    size: bytes, where known: a file of another length is refused before it is fetched.
    resume: keep what came before a cut in `path` + ".part", for this call's next try and for the next call.
    remedy: what to do when nothing came; by default, to put the file at `path` by hand.
    Raises UsageError when no address gave the file. What is at `path` is then what was there before.
    """
    if path.exists():
        if is_whole(path, sha256):
            return False
        print(f"{path.name}: here, but not the file known (its SHA-256 differs); fetching it again", flush=True)
    part = path.with_name(f"{path.name}.part")
    reasons = []
    with _alone(part, resume) as draft:
        for place in [address] if isinstance(address, str) else address:
            if (why := _complete(draft, place, sha256, size, resume)) is None:
                with _writing(path):
                    os.replace(part, path)
                return True
            reasons.append(f"{place}: {why}")
    remedy = remedy or f"try again, or put the file at {path} by hand"
    raise UsageError(f"{path.name} did not come ({'; '.join(reasons)}); {remedy}.")


def _complete(draft: BufferedRandom, place: str, sha256: str, size: int | None, resume: bool) -> str | None:
    """Ask `place` for what the draft lacks. Return None if it is whole then, or why it is not."""
    why = ""
    for _ in range(TRIES if resume else 1):
        if resume and _length(draft) and _sum(draft) == sha256:  # stopped between the last byte and the new name
            return None
        if not resume or (size is not None and _length(draft) >= size):
            draft.truncate(0)
        held = _length(draft)
        try:
            _receive(draft, place, size)
        except UsageError:
            raise
        except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
            why = _reason(error)
            if _length(draft) <= held:
                return why
        else:
            if _sum(draft) == sha256:
                return None
            why = f"{_length(draft):,} bytes that are not the file known, its SHA-256 differs; nothing of it was kept"
            draft.truncate(0)
            if not held:  # else what was held may have been wrong: once more, from the start
                return why
    return why


def _receive(draft: BufferedRandom, place: str, size: int | None) -> None:
    """Append to the draft what it lacks of the file at `place`, or start again where the server knows no Range.

    Source of the protocol: RFC 9110, section 14 (range requests).
    """
    from tqdm import tqdm

    held = _length(draft)
    request = urllib.request.Request(place, headers={"Range": f"bytes={held}-"} if held else {})
    try:
        answer = urllib.request.urlopen(request, timeout=LIMIT)
    except HTTPError as error:
        if error.code != 416 or not held or size is not None:
            raise
        draft.truncate(0)  # "range not satisfiable": the draft is as long as the file, or longer, and yet not the file
        _receive(draft, place, size)
        return
    with answer:
        start = held if held and _goes_on(answer, held) else 0
        promised = answer.headers.get("Content-Length")
        total = size if promised is None else start + int(promised)
        if size is not None and total != size:
            raise ValueError(f"{total:,} bytes where {size:,} are known")
        draft.truncate(start)
        name = Path(draft.name).stem  # beside the bar, which disable=None shows on a terminal only
        with tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=name, leave=False, disable=None) as bar:
            while piece := answer.read1(PIECE):
                with _writing(Path(draft.name)):
                    draft.write(piece)
                    draft.flush()
                bar.update(len(piece))
                if total is not None and _length(draft) > total:
                    draft.truncate(0)
                    raise ValueError(f"more than {total:,} bytes came")
    came = _length(draft)
    if total is not None and came != total:
        raise ConnectionError(f"broke off after {came:,} of {total:,} bytes")


def _goes_on(answer: Any, held: int) -> bool:
    """Say whether the answer begins at byte `held`; False if at byte 0; raise ValueError if elsewhere."""
    if answer.status != 206:  # None for file://
        return False
    if not answer.headers.get("Content-Range", "").startswith(f"bytes {held}-"):
        raise ValueError("another part came than the one asked for")
    return True


@contextlib.contextmanager
def _alone(part: Path, keep: bool) -> Iterator[BufferedRandom]:
    """Open the draft to read and append, its folder made, or raise UsageError while another process writes it.

    At the end a draft that has not got its final name is removed if it is empty, or not for keeps.
    """
    with _writing(part):
        part.parent.mkdir(parents=True, exist_ok=True)
        draft = part.open("a+b")
    with draft:
        if not _locked(draft, part):
            raise UsageError(f"{part} is being written by another process; wait until it ends, and run this again.")
        try:
            yield draft
        finally:
            if _is(draft, part) and not (keep and _length(draft)):
                part.unlink()


def _locked(draft: BufferedRandom, part: Path) -> bool:
    """Take the draft for this process; False if another has it, or gave it its final name a moment ago."""
    try:
        fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return _is(draft, part)


def _is(draft: BufferedRandom, part: Path) -> bool:
    return part.exists() and os.path.samestat(os.fstat(draft.fileno()), part.stat())


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing right into a UsageError, so that it is not taken for the network's fault."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); free that place, or name another.") from error


def _length(draft: BufferedRandom) -> int:
    return draft.seek(0, os.SEEK_END)


def _sum(file: BufferedRandom | BufferedReader) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    return str(getattr(error, "reason", None) or error)
