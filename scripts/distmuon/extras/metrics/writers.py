"""Where observations are written: the console, a file of JSON lines, TensorBoard. One rank writes.

A record is a dict of floats, None and dicts of them, see `Metrics`. None: not measured in this step. What comes from
`Metrics.log` holds step, time and scalars alone.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

BEGINNING = b'{"step": '  # of every line


class Writer(Protocol):
    """What takes records. Constructed on every rank; opened, written to and closed on one."""

    def open(self, start: int) -> None:
        """Begin. start: steps made before, for a run that is resumed. Raises OSError or ValueError."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record. Raises OSError."""

    def close(self) -> None:
        """End; twice does no harm."""


class Console:
    """One line per record: totals, samples, shares of the step.

    stream: standard output if not given.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream

    def open(self, start: int) -> None:
        """Nothing to do."""

    def write(self, record: Mapping[str, Any]) -> None:
        print(line(record), file=self._stream or sys.stdout, flush=True)

    def close(self) -> None:
        """Nothing to do."""


class JsonLines:
    """One line of JSON per observation, everything in it; a folder that is missing is made.

    Lines are appended, so that a resumed run goes on in its file. Where it repeats steps, the later line counts, of
    observations as of what was logged. Each line is handed over whole: what a killed run leaves is readable, but for at
    most a torn last line, which the next run takes away. JSON has no numbers for these: "NaN", "Infinity" and
    "-Infinity" are strings, which `float` reads.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._file = Path(path), -1

    def open(self, start: int) -> None:
        """Make the file, or go on in it; raises ValueError for a file that holds something else."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size, whole, beginnings = os.fstat(self._file).st_size, 0, list[bytes]()
        if size:
            with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as held:
                whole = held.rfind(b"\n") + 1
                beginnings = [held[place : place + len(BEGINNING)] for place in (0, whole) if place < size]
        if not all(BEGINNING.startswith(found) for found in beginnings):
            self.close()
            raise ValueError(f"{self.path} holds something else than observations; name another file.")
        os.ftruncate(self._file, whole)

    def write(self, record: Mapping[str, Any]) -> None:
        rest = json.dumps(_sayable(record), allow_nan=False).encode() + b"\n"
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class TensorBoard:
    """One scalar for every number, by torch's SummaryWriter, which needs the package tensorboard.

    A resumed run's events of later steps are purged, as TensorBoard does it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self._writer = Path(folder), None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError(
                f"TensorBoard({str(folder)!r}) needs the package tensorboard ({error}); run `pip install tensorboard`, "
                "or write JsonLines."
            ) from None
        self._make: Any = SummaryWriter

    def open(self, start: int) -> None:
        self._writer = self._make(str(self.folder), purge_step=start + 1 if start else None)

    def write(self, record: Mapping[str, Any]) -> None:
        writer: Any = self._writer
        for tag, value in scalars(record):
            writer.add_scalar(tag, value, record["step"], walltime=record["time"])
        writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def line(record: Mapping[str, Any]) -> str:
    """Return a record as one line for people: what is None is left out."""
    totals = {name.replace("_", " "): value for name, value in record.get("totals", {}).items()}
    parts = [f"{name} {value:.3g}" for name, value in totals.items() if value is not None]
    parts += [f"{name} {value:.3g}" for name, value in record["scalars"].items() if value is not None]
    for name, found in record.get("samples", {}).items():
        parts.append(f"{name}: orthogonality error {found['error']:.2g}, cosine {found['cosine']:.4f}")
    if "seconds" in record:  # an observation, and not what was logged
        shares = f"{record['communication']:.0%} communication, {record['newton_schulz']:.0%} Newton–Schulz"
        parts.append(f"{record['seconds'] * 1e3:.3g} ms: {shares}, {record['sent_bytes']:,.0f} bytes sent")
    return f"step {record['step']}{' (skipped)' if record.get('skipped') else ''}: " + "; ".join(parts)


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a record but step and time, with its path: ("totals/update_rms", 0.2)."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            yield from scalars({str(number): one for number, one in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, int | float) and (prefix or name not in ("step", "time")):
            yield prefix + name, float(value)


def _sayable(value: Any) -> Any:
    """Return a record as JSON can say it."""
    if isinstance(value, Mapping):
        return {name: _sayable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
