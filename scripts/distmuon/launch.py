"""Start a world: the same worker function as local processes, under torchrun, or as one process.

    def work(world, steps): ...                      # runs on every rank
    results = launch.run(work, (20,), dp=4, tp=2)    # one result per rank, in rank order

Which of the three starts it is follows from the surroundings. Under torchrun, RANK and WORLD_SIZE are set, and this
process is one rank. With dp * tp = 1 the worker runs right here. Otherwise ranks are local processes, watched by
`supervise`: none of them outlives a failure, Ctrl-C, or the death of the process that started them.

This module imports torch only when a rank starts, so that a wrong argument is answered at once and the local ranks'
2 s of imports overlap with this process's own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distmuon import rank, session, supervise
from distmuon.arguments import (
    BACKENDS,
    DEFAULT_TIMEOUT,
    DEVICES,
    UsageError,
    add_arguments,
    check_writable,
    choices,
    options,
    parser,
)
from distmuon.hosts import Link, is_switch
from distmuon.supervise import WorldError

__all__ = [
    "UsageError", "World", "WorldError", "add_arguments", "check_writable", "choices", "command", "options", "parser",
    "run", "seconds_since", "speaks", "under_torchrun",
]  # fmt: skip
READER_LEFT = 141  # 128 + SIGPIPE: what a shell reports of a command whose output nobody reads any more


@dataclass(frozen=True)
class World:
    """What a worker knows about the run it is part of.

    rank, size: as in torch.distributed. dp, tp: the grid's sizes, D and T. timeout: seconds, for every collective.
    device: "cpu" or "cuda". started: wall-clock time (seconds) at which the command started. link: each rank's own
    network, if it has one (see `hosts`).
    """

    rank: int
    size: int
    dp: int
    tp: int
    backend: str
    device: str
    timeout: float
    threads: int
    started: float
    link: Link | None = None

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's picklable `value`, in rank order, on rank 0; None elsewhere. All ranks must call it."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values)
        return values

    def report(self, text: str) -> None:
        """Print every rank's text, in rank order, from rank 0. All ranks must call it."""
        texts = self.gather(text)
        if texts is not None:
            print("\n".join(texts), flush=True)

    def say(self, text: str = "") -> None:
        """Print on rank 0 alone. Other ranks stay silent, so that output never interleaves."""
        if self.rank == 0:
            print(text, flush=True)


def run(
    worker: Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    dp: int = 1,
    tp: int = 1,
    backend: str = "gloo",
    device: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    threads: int = 1,
    link: Link | None = None,
) -> list[Any]:
    """Run `worker(world, *arguments)` on dp * tp ranks; return what each returned, in rank order.

    worker: a function at the top level of a module: other processes import it by name, which is why a function
        defined in a notebook cell cannot be one.
    link: give every local rank a network of its own; after `hosts.become_switch`.
    Under torchrun the list holds this rank's result only.
    Raises UsageError before anything is started; WorldError, naming the first failure, when a rank fails.
    """
    world = World(0, dp * tp, dp, tp, backend, device or "", timeout, threads, session.process_start(), link)
    world = _validated(world, int(os.environ["WORLD_SIZE"]) if under_torchrun() else None)
    if under_torchrun():
        with session.environment(session.directory()):
            return [rank.run(replace(world, rank=int(os.environ["RANK"])), None, worker, arguments)]
    if world.size == 1:
        return [rank.run_alone(world, worker, arguments)]
    payload = _pickled(worker, arguments)
    start_method = "forkserver" if world.device == "cpu" and sys.platform == "linux" else "spawn"
    return supervise.run_local(rank.run_local, (world, payload), world.size, start_method, timeout)


def command(main: Callable[[], int | None]) -> None:
    """Run a worker's `main` and exit: 0, or its own code; 2 after a UsageError; 1 after a WorldError; 130 on Ctrl-C;
    128 + the signal's number on SIGTERM or SIGHUP; 141, without a word, when nobody reads the output any more (| head).
    """
    atexit.register(session.ignore_interrupts)  # a second Ctrl-C must find no half-closed interpreter to complain in
    # torchrun stops its ranks by SIGTERM, and a rank blocked in a collective could not run a Python handler
    with contextlib.nullcontext() if under_torchrun() else session.stoppable():
        try:
            code = main() or 0
            sys.stdout.flush()  # here, not at the interpreter's end: a closed pipe is still an exception
        except UsageError as error:
            code = _complain(error, 2)
        except (WorldError, BrokenPipeError) as error:
            if _reader_left(error):
                code = READER_LEFT
            elif isinstance(error, WorldError):
                code = _complain(error, 1)
            else:
                raise
        except KeyboardInterrupt:
            code = _complain("interrupted; every rank was stopped.", 130)
        except session.Stopped as stopped:
            code = _complain(f"stopped by {stopped.name}; every rank was stopped.", stopped.exit_code)
        sys.exit(code)


def _complain(what: object, code: int) -> int:
    if not speaks():
        time.sleep(1)  # torchrun ends every rank as soon as one has left: rank 0 speaks first
        return code
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"error: {what}", file=sys.stderr, flush=True)
    return code


def _reader_left(error: Exception) -> bool:
    """Say whether `error`, here or in the rank that prints, means that standard output is closed, as after `| head`.

    If so, what is still buffered goes nowhere, or the interpreter would complain of it at its end.
    """
    broken = isinstance(error, BrokenPipeError) or str(error).rpartition("\n")[2].startswith("BrokenPipeError")
    watch = select.poll()
    watch.register(1, 0)  # only what poll reports unasked: an error, a hang-up
    if not broken or not watch.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def speaks() -> bool:
    """Say whether this process prints, writes and draws: under torchrun rank 0 alone does."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def under_torchrun() -> bool:
    """Say whether torchrun has started this process, as one rank of many."""
    return os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def _pickled(worker: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Return what every rank receives, or raise UsageError."""
    name = getattr(worker, "__qualname__", repr(worker))
    if getattr(worker, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise UsageError(f"{name} was defined in a notebook cell or at a prompt; ranks import it, so put it in a file.")
    try:
        return pickle.dumps((worker, tuple(arguments)))
    except Exception as error:
        raise UsageError(
            f"{name} and its arguments cannot be sent to other processes ({error}); "
            "use a function at the top level of a module, and plain data."
        ) from error


def _validated(world: World, launched: int | None) -> World:
    """Return the world with "auto" resolved, or raise UsageError. launched: ranks that torchrun started, if it did."""
    if world.dp < 1 or world.tp < 1:
        raise UsageError(f"--dp {world.dp} --tp {world.tp}: both must be at least 1.")
    if world.backend not in BACKENDS:
        raise UsageError(f"--backend {world.backend} is unknown; choose one of {', '.join(BACKENDS)}.")
    if world.device not in ("", *DEVICES):
        raise UsageError(f"--device {world.device} is unknown; choose one of {', '.join(DEVICES)}.")
    if not 0 < world.timeout < 1e9 or world.threads < 1:
        raise UsageError(f"--timeout {world.timeout:g} --threads {world.threads}: both must be positive.")
    if launched is not None and launched != world.size:
        raise UsageError(
            f"torchrun started {launched} ranks, but --dp {world.dp} --tp {world.tp} makes {world.size}; "
            "choose --dp and --tp whose product is the number of ranks."
        )
    if world.link is not None and (launched is not None or world.backend != "gloo"):
        raise UsageError("a network for each rank goes with local ranks on gloo only; drop torchrun and --backend.")
    if world.link is not None and not is_switch():
        raise UsageError("a network for each rank needs a switch; call hosts.become_switch() before the world starts.")
    if world.backend == "gloo" and world.device != "cuda":
        return replace(world, device="cpu")
    return _with_gpus(world, world.size if launched is None else int(os.environ.get("LOCAL_WORLD_SIZE", launched)))


def _with_gpus(world: World, local_ranks: int) -> World:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world.backend == "auto":
        fits = gpus >= local_ranks and world.device != "cpu"
        world = replace(world, backend="nccl" if fits else "gloo", device="cuda" if fits else world.device or "cpu")
    if gpus == 0 and "cuda" in (world.device, "cuda" if world.backend == "nccl" else ""):
        raise UsageError(
            f"--backend {world.backend} on GPUs needs CUDA, and torch sees no GPU here; use --backend gloo."
        )
    if world.backend == "nccl":
        if world.device == "cpu":
            raise UsageError("--backend nccl runs on GPUs only; drop --device cpu or use --backend gloo.")
        if gpus < local_ranks:
            raise UsageError(
                f"nccl needs one GPU per rank: {local_ranks} ranks, {gpus} GPU(s); use fewer ranks or --backend gloo."
            )
        return replace(world, device="cuda")
    return world


def seconds_since(started: float) -> float:
    """Return wall-clock seconds since `started`, a `World.started`."""
    return time.time() - started
