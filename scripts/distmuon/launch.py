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

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from distmuon import supervise
from distmuon.supervise import WorldError

BACKENDS = ("gloo", "nccl", "auto")
DEVICES = ("cpu", "cuda")
DEFAULT_TIMEOUT = 60.0  # seconds; NCCL's own default of 10 minutes turns every mistake into a coffee break


class UsageError(ValueError):
    """A wrong argument. `command` prints it as one sentence and exits with code 2; nothing was started."""


@dataclass(frozen=True)
class World:
    """What a worker knows about the run it is part of.

    rank, size: as in torch.distributed. dp, tp: the grid's sizes, D and T. timeout: seconds, for every collective.
    device: "cpu" or "cuda". started: wall-clock time (seconds) at which the command started.
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


def add_arguments(parser: argparse.ArgumentParser, dp: int, tp: int) -> None:
    """Add the arguments that every worker shares, with this worker's default grid."""
    parser.add_argument("--dp", type=int, default=dp, help="data-parallel ranks, D (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=tp, help="tensor-parallel ranks, T (default: %(default)s)")
    parser.add_argument(
        "--backend",
        default="gloo",
        metavar="{gloo,nccl,auto}",
        help="default: %(default)s (CPU); nccl: one GPU per rank",
    )
    parser.add_argument("--device", default=None, metavar="{cpu,cuda}", help="default: cuda with nccl, else cpu")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="per collective (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per rank (default: %(default)s)")


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for `run` that `add_arguments` parsed."""
    return {name: getattr(arguments, name) for name in ("dp", "tp", "backend", "device", "timeout", "threads")}


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
) -> list[Any]:
    """Run `worker(world, *arguments)` on dp * tp ranks; return what each returned, in rank order.

    worker: a function at the top level of a module: other processes import it by name, which is why a function
        defined in a notebook cell cannot be one.
    Under torchrun the list holds this rank's result only.
    Raises UsageError before anything is started; WorldError, naming the first failure, when a rank fails.
    """
    world = World(0, dp * tp, dp, tp, backend, device or "", timeout, threads, supervise.process_start())
    torchrun = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    world = _validated(world, int(os.environ["WORLD_SIZE"]) if torchrun else None)
    if torchrun:
        return [_as_rank(replace(world, rank=int(os.environ["RANK"])), None, worker, arguments)]
    if world.size == 1:
        with supervise.session_directory() as directory:
            return [_as_rank(world, directory, worker, arguments)]
    start_method = "forkserver" if world.device == "cpu" and sys.platform == "linux" else "spawn"
    return supervise.run_local(_as_local_rank, (world, worker, tuple(arguments)), world.size, start_method, timeout)


def command(main: Callable[[], int | None]) -> None:
    """Run a worker's `main` and exit: 0, or its own code; 2 after a UsageError; 1 after a WorldError; 130 on Ctrl-C."""
    try:
        sys.exit(main() or 0)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except WorldError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("error: interrupted; every rank was stopped.", file=sys.stderr)
        sys.exit(130)


def _validated(world: World, launched: int | None) -> World:
    """Return the world with "auto" resolved, or raise UsageError. launched: ranks that torchrun started, if it did."""
    if world.dp < 1 or world.tp < 1:
        raise UsageError(f"--dp {world.dp} --tp {world.tp}: both must be at least 1.")
    if world.backend not in BACKENDS:
        raise UsageError(f"--backend {world.backend} is unknown; choose one of {', '.join(BACKENDS)}.")
    if world.device not in ("", *DEVICES):
        raise UsageError(f"--device {world.device} is unknown; choose one of {', '.join(DEVICES)}.")
    if world.timeout <= 0 or world.threads < 1:
        raise UsageError(f"--timeout {world.timeout:g} --threads {world.threads}: both must be positive.")
    if launched is not None and launched != world.size:
        raise UsageError(
            f"torchrun started {launched} ranks, but --dp {world.dp} --tp {world.tp} makes {world.size}; "
            "choose --dp and --tp whose product is the number of ranks."
        )
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


def _as_local_rank(
    rank: int, directory: str, world: World, worker: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    return _as_rank(replace(world, rank=rank), directory, worker, arguments)


def _as_rank(world: World, directory: str | None, worker: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Join the process group, run the worker, leave the group. directory: for the FileStore; None under torchrun."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(world.threads)
    if world.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", world.rank)) % torch.cuda.device_count())
    if world.size == 1 and world.backend == "gloo":
        return worker(world, *arguments)  # a world of one needs no process group, and no collective is called
    loopback = directory is not None  # local ranks only; under torchrun the hosts choose their interface
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.FileStore(os.path.join(directory, "store"), world.size) if directory is not None else None
    limit = timedelta(seconds=world.timeout)
    if store is None:
        dist.init_process_group(world.backend, timeout=limit)
    else:
        dist.init_process_group(world.backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
    result = worker(world, *arguments)
    if world.size > 1:
        dist.barrier()  # leave together: a rank that is still reading must not see its peers' sockets close
    dist.destroy_process_group()  # a rank that failed does not come here: its process ends, which closes everything
    return result


def seconds_since(started: float) -> float:
    """Return wall-clock seconds since `started`, a `World.started`."""
    return time.time() - started
