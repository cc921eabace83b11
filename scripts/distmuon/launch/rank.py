"""A rank's life: join the process group, run the worker, leave the group."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

from distmuon.launch import session
from distmuon.launch.cli import OutputError, UsageError
from distmuon.launch.world import World

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # where gloo meets on one host
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

    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ and directory is None else None
    if agent is not None:
        threading.Thread(target=_end_with_agent, args=(world.rank, agent), daemon=True).start()
    work = load(worker)
    torch.set_num_threads(world.threads)
    gpu = None
    if world.device == "cuda":  # of several, or the only one that this process is shown
        gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", world.rank)) % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
        torch.set_float32_matmul_precision("highest")  # torch's default, which some containers change to TF32
    if world.size == 1 and dist.is_initialized():
        return work(world, *arguments)  # in a program that has a process group: there is no second one
    if world.before_joining is not None:
        world.before_joining()
    if directory is not None or os.environ.get("LOCAL_WORLD_SIZE") == str(world.size):  # one host only
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    store = dist.FileStore(os.path.join(directory, "store"), world.size) if directory is not None else None
    options: dict[str, Any] = {"timeout": timedelta(seconds=world.timeout)}
    if store is not None:
        options |= {"store": store, "rank": world.rank, "world_size": world.size}
    if world.backend == "nccl":
        options["device_id"] = gpu  # or NCCL guesses by rank: every barrier, and every collective of objects
    dist.init_process_group(world.backend, **options)
    try:
        result = work(world, *arguments)
    except BaseException:
        if agent is not None and os.getppid() != agent:
            _end_orphaned(world.rank)  # or the loss of a peer, which ended for the same reason, would be blamed
        if world.size == 1:
            _leave()  # the process lives on; a rank that failed ends, which closes everything
        raise
    if world.size > 1 and dist.is_initialized():
        dist.barrier()  # leave together: a rank that is still reading must not see its peers' sockets close
    _leave()
    return result


def _leave() -> None:
    """Leave the process group, unless the worker has done so by itself, as programs for torchrun do."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_agent(rank: int, agent: int) -> None:
    """End this process when torchrun, which has started it, has been killed: nobody else would, nor start another."""
    while os.getppid() == agent:
        time.sleep(1.0)
    _end_orphaned(rank)


def _end_orphaned(rank: int) -> NoReturn:
    print(f"rank {rank}: torchrun, which had started it, is gone; so it ends.", file=sys.stderr, flush=True)
    os._exit(1)


def run_local(rank: int, directory: str, world: World, payload: bytes) -> Any:
    """Run one of several local ranks, whose launcher says when to stop, and when at once."""
    if world.device == "cpu":
        _take_turns()
    with _noting(world, [signal.SIGTERM], patient=True):
        return run(replace(world, rank=rank), directory, *pickle.loads(payload))


def run_and_pack(rank: int, directory: str, world: World, payload: bytes) -> bytes | None:
    """Do what `run_local` does; return what rank 0 returned, so packed that the launcher imports nothing to read it."""
    result = run_local(rank, directory, world, payload)
    return pickle.dumps(result) if rank == 0 else None


def go_on(result: Any, worker: Worker, more: Sequence[Any]) -> Any:
    """Return what `worker` makes of what rank 0 has returned; None where that is None."""
    return None if result is None else load(worker)(result, *more)


def unpack_and_go_on(
    rank: int, directory: str, world: World, packed: bytes, payload: bytes
) -> tuple[Any, Exception | None]:
    """Do what `go_on` does in a process of its own, with as many threads as a rank had; return its error as well."""
    import torch

    torch.set_num_threads(world.threads)
    try:
        result = go_on(pickle.loads(packed), *pickle.loads(payload))
        sys.stdout.flush()  # here, where it is still an error that nobody reads
        return result, None
    except (UsageError, OutputError) as error:
        return None, error


def _take_turns() -> None:
    """Keep a rank that a message wakes from interrupting the one that computes; must come before gloo's threads.

    By default Linux does interrupt, and where ranks outnumber cores nearly every message costs two switches more:
    measured with 8 ranks on 2 cores, steps of small matrices took 1.7 times as long, and the kernel 2.6 times.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # not permitted in every container, and needed in none
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run_under_torchrun(world: World, worker: Worker, arguments: Sequence[Any]) -> Any:
    """Run the rank that torchrun has started, in this process. A Ctrl-C comes twice: from the terminal, and as SIGTERM
    from torchrun, which kills what has not left half a minute later."""
    with session.environment(session.directory()), _noting(world, session.STOPPING, patient=True):
        return run(replace(world, rank=int(os.environ["RANK"])), None, worker, arguments)


def run_alone(world: World, worker: Worker, arguments: Sequence[Any]) -> Any:
    """Run the only rank in this process, and leave the process as it was."""
    import torch

    home, threads, precision = session.directory(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        with (
            _noting(world, session.STOPPING, patient=False),
            session.environment(home, GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)),
            tempfile.TemporaryDirectory(prefix="world-", dir=home) as directory,
        ):
            return run(world, directory, worker, arguments)
    finally:
        torch.set_num_threads(threads)
        if world.device == "cuda":
            torch.set_float32_matmul_precision(precision)


def _noting(world: World, numbers: Sequence[int], patient: bool) -> contextlib.AbstractContextManager[None]:
    """Note these signals where ranks are asked to stop; else leave them as they are."""
    return contextlib.nullcontext() if world.stop_within is None else session.noting_stops(numbers, patient)
