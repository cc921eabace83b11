"""What runs on GPUs: every job of every worker that takes --device, with each backend that carries a GPU's tensors."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch
import worlds

from distmuon import launch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0  # that torch sees here
ELSEWHERE = {("04_does_it_learn", "--recipe")}  # its data is not here, and is fetched only on request


class Job(NamedTuple):
    """One job of a worker. job: as in the worker's TAKES. options: a small one of its kind.

    dp, tp: for several ranks; 0 where the job has no grid. alone: a single rank may do it, too. gloo: ranks may share a
    GPU; not where DTensors are gathered, which torch does for no GPU over gloo.
    """

    worker: str
    job: str
    options: str = ""
    dp: int = 2
    tp: int = 1
    alone: bool = True
    gloo: bool = True


JOBS = (
    Job("02_newton_schulz", "", "--shape 96x64", dp=0),
    Job("02_newton_schulz", "--svd", "--svd", dp=0),
    Job("04_does_it_learn", "", "--task digits --quick --steps 5", dp=0),
    Job("05_processes_and_collectives", "--show collectives", "--show collectives", alone=False),
    Job("05_processes_and_collectives", "--show groups", "--show groups", tp=2, alone=False),
    Job("06_zero1", "", "--steps 5"),
    Job("06_zero1", "--compare", "--compare", alone=False),
    Job("07_virtual_map", "", "--bucket-size 64", dp=4),
    Job("08_muon_over_dp", "", "--steps 5", dp=4),  # four: in the exact row, sums of three or more have an order
    Job("08_muon_over_dp", "--follow", "--follow"),
    Job("08_muon_over_dp", "--ways", "--ways", alone=False),
    Job("09_tensor_parallel", "", "--steps 5", dp=1, tp=2),
    Job("09_tensor_parallel", "--small", "--small", dp=1, tp=2, alone=False),
    Job("10_dp_tp", "", dp=4, tp=2),
    Job("10_dp_tp", "", "--dtype bfloat16", dp=2, tp=2),
    Job("10_dp_tp", "--mutants", "--mutants", dp=2, tp=2, alone=False),
    Job("12_bytes", "", dp=2, tp=2),
    Job("13_memory", "", dp=2, tp=2),
    Job("14_traces", "", dp=2, tp=2, alone=False),
    Job("14_traces", "--traces", "--traces out/gpu/traces", alone=False),
    Job("14_traces", "--schedules", "--schedules", tp=2, alone=False),
    Job("14_traces", "--hiding", "--hiding", tp=2, alone=False),
    Job("16_owner", "", dp=2, tp=2),
    Job("17_muonw", "", dp=2, tp=2, alone=False, gloo=False),
    Job("17_muonw", "--train", "--train 6", dp=2, tp=2),
    Job("train", "", "--steps 6", dp=2, tp=2),
    Job("train", "", "--steps 6 --sharding zero1 --dtype bfloat16", dp=2, tp=2),
)


class Run(NamedTuple):
    """A command to try. gpus: how many it needs."""

    name: str
    gpus: int
    words: list[str]


def runs() -> list[Run]:
    """Return every job in every way: gloo ranks that share a GPU, one rank on nccl, one GPU per rank on nccl."""
    found = []
    for job in JOBS:
        name = " ".join([job.worker, *job.options.split()])
        begin = [str(worlds.ROOT / "scripts" / f"{job.worker}.py"), *job.options.split()]
        if not job.dp:
            found.append(Run(f"{name}, one process", 1, [*begin, "--device", "cuda"]))
            continue
        grid = ["--dp", str(job.dp), "--tp", str(job.tp), "--timeout", "120"]
        if job.gloo:
            found.append(Run(f"{name}, gloo", 1, [*begin, *grid, "--backend", "gloo", "--device", "cuda"]))
        found.append(Run(f"{name}, nccl", job.dp * job.tp, [*begin, *grid, "--backend", "nccl"]))
        if job.alone:
            found.append(Run(f"{name}, nccl alone", 1, [*begin, "--dp", "1", "--tp", "1", "--backend", "nccl"]))
    return found


def takers() -> set[tuple[str, str]]:
    """Return (worker, job) of all jobs that take --device, by the workers' own lists; one with one job has no list."""
    found = {("train", "")}  # the trainer, whose options are in distmuon.models.run_settings
    for path in (worlds.ROOT / "scripts").glob("[0-9]*.py"):
        only = {"": launch.WORLD if "launch.add_arguments(" in path.read_text(encoding="utf-8") else ()}
        takes = getattr(importlib.import_module(path.stem), "TAKES", only)
        found |= {(path.stem, job) for job, options in takes.items() if "device" in options}
    return found
