"""A rank's life: join the process group, run the worker, leave the group."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from distmuon.launch import hosts, session
from distmuon.launch.world import World

Worker = Callable[..., Any] | str  # a function, or its name, "package.module:function"


def load(worker: Worker) -> Callable[..., Any]:
    """Return the function that `worker` is or names; its module, and torch with it, is imported here at the latest."""
    if not isinstance(worker, str):
        return worker
    module, _, function = worker.partition(":")
    return getattr(importlib.import_module(module), function)


def run(world: World, directory: str | None, worker: Worker, arguments: Sequence[Any]) -> Any:
    """Join the process group, run the worker, leave the group. directory: for the FileStore; None under torchrun."""
    import torch
    import torch.distributed as dist

    work = load(worker)
    torch.set_num_threads(world.threads)
    if world.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", world.rank)) % torch.cuda.device_count())
    if world.size == 1 and world.backend == "gloo":
        return work(world, *arguments)  # a world of one needs no process group, and no collective is called
    if world.link is not None:
        hosts.plug_in(world.link)
    elif world.size > 1 and (directory is not None or os.environ.get("LOCAL_WORLD_SIZE") == str(world.size)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")  # one host only
    store = dist.FileStore(os.path.join(directory, "store"), world.size) if directory is not None else None
    limit = timedelta(seconds=world.timeout)
    if store is None:
        dist.init_process_group(world.backend, timeout=limit)
    else:
        dist.init_process_group(world.backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
    try:
        result = work(world, *arguments)
    except BaseException:
        if world.size == 1:
            dist.destroy_process_group()  # the process lives on; a rank that failed ends, which closes everything
        raise
    if world.size > 1:
        dist.barrier()  # leave together: a rank that is still reading must not see its peers' sockets close
    dist.destroy_process_group()
    return result


def run_local(rank: int, directory: str, world: World, payload: bytes) -> Any:
    return run(replace(world, rank=rank), directory, *pickle.loads(payload))


def run_alone(world: World, worker: Worker, arguments: Sequence[Any]) -> Any:
    """Run the only rank in this process, and leave the process as it was."""
    import torch

    home, threads = session.directory(), torch.get_num_threads()
    try:
        with session.environment(home), tempfile.TemporaryDirectory(prefix="world-", dir=home) as directory:
            return run(world, directory, worker, arguments)
    finally:
        torch.set_num_threads(threads)
