"""What every worker does alike: it runs a job on the ranks, tells of it, and writes a file of results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distmuon import launch
from distmuon.launch.rank import load


def run_job(arguments: argparse.Namespace, work: str, given: Sequence[Any] = (), *more: Any) -> int:
    """Run a job on the ranks that `arguments` describe, tell of it, and return the worker's exit code.

    work: names the function `(world, *given)` that every rank runs, "package.module:function". What rank 0 returns is
        found; None where there is nothing to tell: under torchrun, rank 0 alone goes on.
    Beside it stands `tell(found, *more)`, which prints, and returns whether all is well, and what --json is to hold or
        None. Named and not imported before: no torch while a wrong argument is answered, and while ranks start.
    """
    found = launch.run(work, given, **launch.options(arguments))[0]
    if found is None:
        return 0
    well, result = load(f"{work.partition(':')[0]}:tell")(found, *more)
    if result is not None and arguments.json:
        write_json(arguments.json, result)
    return 0 if well else 1


def check_json(arguments: argparse.Namespace, written: bool = True) -> None:
    """Raise UsageError where --json cannot be written. written: whether this job has something to write."""
    if launch.speaks():
        launch.check_writable("--json", arguments.json if written else None)


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
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_json(path: str, result: dict[str, Any]) -> None:
    """Write a worker's results, making the folder if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def plural(number: int, noun: str) -> str:
    """Return "1 step", "1,024 steps"."""
    return f"{number:,} {noun}" + "s" * (number != 1)
