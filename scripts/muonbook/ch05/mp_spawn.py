"""The same ranks, started by torch.multiprocessing.spawn, as most tutorials do it, instead of by our launcher."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from typing import Any

import torch.multiprocessing as mp

from distmuon.launch import World, WorldError, rank
from distmuon.launch.world import validated


def start(worker: str, dp: int, tp: int, **options: Any) -> None:
    """Run `worker`, "package.module:function", on dp * tp ranks. options: those of `launch.run`.

    Raises UsageError before anything is started, and WorldError when a rank fails.
    """
    options["device"] = options["device"] or ""
    world = validated(World(0, dp * tp, dp, tp, started=time.time(), **options), launched=None)
    with tempfile.TemporaryDirectory() as directory:
        try:
            spawn(world, worker, directory)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise WorldError(str(error), error.error_index) from None


def spawn(world: World, worker: str, directory: str) -> None:
    """Start all ranks and wait. directory: where they leave their addresses."""
    mp.spawn(be_rank, args=(world, worker, directory), nprocs=world.size)


def be_rank(number: int, world: World, worker: str, directory: str) -> None:
    """Be one rank: mp.spawn puts its number first, and `args` behind it."""
    rank.run(replace(world, rank=number), directory, worker, ())
