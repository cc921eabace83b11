"""Plays an example on the ranks of a world, as torchrun would start it, without the seconds that torchrun takes."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from distmuon.launch import World

EXAMPLES = Path(__file__).resolve().parents[3] / "scripts" / "examples"


def play(world: World, name: str, folder: str, settings: dict[str, str]) -> str:
    """Run an example in this folder; return what this rank prints. It finds the world's process group made already."""
    os.environ.update(settings)
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    setattr(dist, "init_process_group", lambda: None)  # noqa: B010 mypy refuses an assignment
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()
