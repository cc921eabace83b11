"""Plays examples on the ranks of a world, as torchrun would start them, without the seconds that each start takes."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch.distributed as dist

from distmuon.launch import World

EXAMPLES = Path(__file__).resolve().parents[3] / "scripts" / "examples"
NOTHING: Mapping[str, str] = {}
OWN_MODULES = ("task", "hf_trainer")  # of the examples; they read the environment as they are imported


class Performance(NamedTuple):
    """An example, the name of a folder to run it in, what it is to find in the environment, and its arguments."""

    example: str
    folder: str
    settings: Mapping[str, str] = NOTHING
    arguments: Sequence[str] = ()


def play(world: World, home: str, performances: Sequence[Performance]) -> list[str]:
    """Run examples one after the other; return what this rank prints in each. They share the world's process group."""
    group = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    from_torchrun = {name: str(value) for name, value in group.items()} | {"TORCHELASTIC_RUN_ID": "played"}
    printed = []
    for example, folder, settings, arguments in performances:
        program = str(EXAMPLES / f"{example}.py")
        with (
            mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
            mock.patch.object(sys, "argv", [program, *arguments]),
            mock.patch.dict(os.environ, {**from_torchrun, **settings}),
            mock.patch.object(dist, "init_process_group"),
            mock.patch.object(dist, "destroy_process_group"),
            contextlib.chdir(Path(home, folder)),
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            for module in OWN_MODULES:
                sys.modules.pop(module, None)
            runpy.run_path(program, run_name="__main__")
        if "accelerate" in sys.modules:  # whose state outlives the Accelerator that made it
            sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
        printed.append(out.getvalue())
    return printed
