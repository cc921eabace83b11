"""What every worker does alike: it runs a job on the ranks, tells of it, and writes a file of results."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distmuon import launch

HERE = (
    "On this machine "  # begins a printed line about what a machine permits, which a chapter need not print elsewhere
)
READY = "Ready: "  # begins the line of a chapter's first cell, about the machine as well


def run_job(
    arguments: argparse.Namespace, work: str, given: Sequence[Any] = (), *more: Any, report: str = "report"
) -> int:
    """Run a job on the ranks that `arguments` describe, tell of it, and return the worker's exit code.

    work: names the function `(world, *given)` that every rank runs, "package.module:function". What rank 0 returns is
        found; None where there is nothing to tell: under torchrun, rank 0 alone goes on.
    report: names a function `(found, *more)` of the same module, which prints, and returns whether all is well, and
        what --json is to hold or None.
    Both are named, not imported: this process answers wrong arguments, and needs torch only where it is the rank.
    """
    beside = f"{work.partition(':')[0]}:{report}"
    (told,) = launch.run(work, given, on_rank0_result=(beside, more), **launch.options(arguments))
    if told is None:
        return 0
    well, result = told
    if result is not None and arguments.json:
        write_json(arguments.json, result)
    return 0 if well else 1


def check_json(arguments: argparse.Namespace) -> None:
    """Raise UsageError where --json cannot be written."""
    if launch.is_main_process():
        launch.check_writable("--json", arguments.json)


def check_measurement(arguments: argparse.Namespace, job: str) -> None:
    """Raise UsageError where a job that measures, in worlds of its own, has no file for its results."""
    if arguments.json is None:
        raise launch.UsageError(f"{job} writes a file; add --json FILE.")
    if launch.under_torchrun():
        raise launch.UsageError(f"{job} starts worlds of its own; run it without torchrun.")
    launch.check_writable("--json", arguments.json)


@contextlib.contextmanager
def progress(total: int, rank: int) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each step; rank 0 draws a bar on a terminal, and none in a pipe or a notebook.

    `!python` in Jupyter looks like a terminal to its child; JPY_PARENT_PID tells that it is not one.
    """
    if rank or not sys.stderr.isatty() or "JPY_PARENT_PID" in os.environ:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="step", leave=False) as bar:
        yield bar.update


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, cores, system, versions, GPU."""
    import numpy
    import torch

    return {
        "processor": torch.cpu.get_capabilities().get("cpu_name") or platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # not as its own class, for which a reader would import torch
        "numpy": numpy.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


# ---- Files ------------------------------------------------------------------------------------------------

NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def to_json(value: Any, **layout: Any) -> str:
    """Return `value` as JSON that every reader takes. layout: as for `json.dumps`.

    JSON has no number for a training that has diverged: infinities and NaN become the strings "Infinity", "-Infinity"
    and "NaN", as in the JSON of protocol buffers. A null would not tell them apart, nor from a None.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_in_words(value), ensure_ascii=False, allow_nan=False, **layout)


def from_json(text: str) -> Any:
    """Return what `to_json` was given, infinities and NaN included."""
    return _in_numbers(json.loads(text))


def _in_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_words(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_in_words(one) for one in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _in_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_in_numbers(one) for one in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def write_json(path: str | Path, result: Any) -> None:
    """Write a worker's results where --json says; see `to_json` and `write_file`."""
    text = f"{to_json(result, indent=1)}\n"
    write_file("--json", path, lambda file: file.write_text(text, encoding="utf-8"))


def write_file(option: str, path: str | Path, write: Callable[[Path], object]) -> None:
    """Make the folder of the file that `option` asked for, and call `write` with its path.

    Raises launch.OutputError where that fails after all, a disk being full. The work is done by then, so `write` is
    called once more, with a temporary file, which the sentence names.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        kept = _keep(path.suffix, write)
        words = f"what it was to hold is in {kept}" if kept else "there is no room for a temporary file either"
        raise launch.OutputError(f"{option} {path}: cannot be written ({error.strerror}); {words}.") from error


def _keep(suffix: str, write: Callable[[Path], object]) -> Path | None:
    """Let `write` write a temporary file, and return its path; None where that fails, too."""
    try:
        number, name = tempfile.mkstemp(suffix, "muonbook-")
    except OSError:
        return None
    os.close(number)
    kept = Path(name)
    try:
        write(kept)
    except OSError:
        kept.unlink()
        return None
    return kept


def plural(number: int, noun: str) -> str:
    """Return "1 step", "1,024 steps"."""
    return f"{number:,} {noun}" + "s" * (number != 1)
