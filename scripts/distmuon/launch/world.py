"""A world: the grid of ranks that a worker runs on, and every mistake in it that can be told before anything starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from distmuon.launch import session
from distmuon.launch.cli import BACKENDS, DEVICES, UsageError

MOST_RANKS = 256  # on one machine: every gloo group opens a socket to every peer, and a process has some 1,000 in all
MOST_THREADS = 1024
MOST_SECONDS = 10**9  # of which torch still makes a timeout


@dataclass(frozen=True)
class World:
    """What a worker knows about the run it is part of.

    rank, size: as in torch.distributed.
    dp, tp: the grid's sizes, D and T.
    backend: "gloo" or "nccl".
    device: "cpu" or "cuda".
    timeout: seconds, for every collective.
    threads: of the CPU, for this rank.
    started: wall-clock time (seconds) at which the command started.
    before_joining: what every rank calls before it opens a socket, if anything.
    stop_within: seconds that ranks get to return, once they are asked to stop; None: they are not asked.
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
    before_joining: Callable[[], object] | None = None
    stop_within: float | None = None

    def asked_to_stop(self) -> bool:
        """Say whether this rank was asked to stop: see `session`. Others may hear of it a moment apart."""
        return session.stop_code() > 0

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


def under_torchrun() -> bool:
    """Say whether torchrun has started this process, as one rank of many, or somebody who sets what torchrun sets."""
    return os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def validated(world: World, launched: int | None) -> World:
    """Return the world with "auto" resolved, or raise UsageError. launched: ranks that torchrun started, if it did."""
    if world.dp < 1 or world.tp < 1:
        raise UsageError(f"--dp {world.dp} --tp {world.tp}: both must be at least 1.")
    if world.backend not in BACKENDS:
        raise UsageError(f"--backend {world.backend} is unknown; choose one of {', '.join(BACKENDS)}.")
    if world.device not in ("", *DEVICES):
        raise UsageError(f"--device {world.device} is unknown; choose one of {', '.join(DEVICES)}.")
    if not world.timeout > 0 or world.threads < 1:
        raise UsageError(f"--timeout {world.timeout:g} --threads {world.threads}: both must be positive.")
    if world.timeout > MOST_SECONDS:
        raise UsageError(f"--timeout {world.timeout:g}: a collective waits {MOST_SECONDS:,} seconds at most.")
    if world.stop_within is not None and not 0 < world.stop_within < MOST_SECONDS:
        raise UsageError(f"stop_within is {world.stop_within:g}; give a positive number of seconds, or None.")
    if world.threads > MOST_THREADS:
        raise UsageError(f"--threads {world.threads}: a rank gets at most {MOST_THREADS}; choose about one per core.")
    if launched is None and world.size > MOST_RANKS:
        raise UsageError(
            f"--dp {world.dp} --tp {world.tp}: one machine gets at most {MOST_RANKS} ranks; "
            "choose fewer, or start them on several with torchrun."
        )
    if launched is None and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        raise UsageError(
            f"srun started {os.environ['SLURM_STEP_NUM_TASKS']} processes that do not know their rank; let it start "
            "one torchrun per node, or export RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NTASKS, LOCAL_RANK=$SLURM_LOCALID, "
            "MASTER_ADDR and MASTER_PORT in each."
        )
    if launched is not None and launched != world.size:
        raise UsageError(
            f"torchrun started {launched} ranks, but --dp {world.dp} --tp {world.tp} makes {world.size}; "
            "choose --dp and --tp whose product is the number of ranks."
        )
    if world.backend == "gloo" and world.device != "cuda":
        return replace(world, device="cpu")
    return _with_gpus(world, launched)


def _with_gpus(world: World, launched: int | None) -> World:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_ranks = world.size if launched is None else _ranks_here(launched, gpus)
    if world.backend == "auto":
        fits = gpus >= local_ranks and world.device != "cpu"
        world = replace(world, backend="nccl" if fits else "gloo", device="cuda" if fits else world.device or "cpu")
    if gpus == 0 and "cuda" in (world.device, "cuda" if world.backend == "nccl" else ""):
        remedy = "use --backend gloo" if world.backend == "nccl" else "leave out --device cuda"
        raise UsageError(f"--backend {world.backend} on GPUs needs CUDA, and torch sees no GPU here; {remedy}.")
    if world.backend == "nccl":
        if world.device == "cpu":
            raise UsageError("--backend nccl runs on GPUs only; drop --device cpu or use --backend gloo.")
        if gpus < local_ranks:
            raise UsageError(
                f"nccl needs one GPU per rank: {local_ranks} ranks, {gpus} GPU(s); use fewer ranks or --backend gloo."
            )
        return replace(world, device="cuda")
    return world


def _ranks_here(launched: int, gpus: int) -> int:
    """Return how many of the ranks that somebody else has started share the `gpus` that this process sees."""
    if gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return 1  # a scheduler gave this rank a GPU of its own: device 0, whatever LOCAL_RANK is
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ.get("LOCAL_RANK", launched - 1)) + 1  # srun: at least those up to this one


def seconds_since(started: float) -> float:
    """Return wall-clock seconds since `started`, a `World.started`."""
    return time.time() - started
