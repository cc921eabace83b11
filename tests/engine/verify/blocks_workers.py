"""What every rank of a grid finds out about the strategies that are other optimizers: blockwise and periodic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from optimizer_cases import (
    ABSENT,
    MUON,
    OTHER_MUON,
    SMALL,
    Case,
    build,
    give,
    go_on,
    restore,
    saved,
    train_sharded,
    values,
)
from torch import Tensor

from distmuon import launch
from distmuon.models.networks import MLP
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.fast_paths import fast_dtype
from distmuon.optim.overlap import PipelinedMuon
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.buffers import dtype_name
from distmuon.sharding.grid import Grid
from distmuon.verify.memory_tracker import StorageTracker
from distmuon.verify.prediction import predict_transient

PERIODIC = (MUON | {"whole_every": 3}, OTHER_MUON | {"whole_every": 2, "block_lr_ratio": 0.7}, SMALL.groups[2])
CASES: dict[str, Case] = {  # of four steps, in which the first group is whole once, and the second twice
    "small": replace(SMALL, groups=PERIODIC),
    "bf16 and fp32": replace(SMALL.of_dtype(torch.bfloat16, torch.float32), groups=PERIODIC),
    "float64": replace(SMALL.of_dtype(torch.float64), groups=PERIODIC),
    "absent": replace(ABSENT, groups=PERIODIC),
}


def facts(world: launch.World) -> dict[str, Any]:
    grid = Grid.of(world)
    outcomes = {name: train_sharded(case, grid, strategy="periodic") for name, case in CASES.items()}
    small = CASES["small"]
    for size in (1, 10_000):
        outcomes[f"buckets of {size}"] = train_sharded(small, grid, strategy="periodic", bucket_size=size)
    outcomes["updates"] = train_sharded(small, grid, strategy="periodic", publish="updates")
    outcomes["every step"] = train_sharded(SMALL, grid, **periodic(1))
    outcomes["never"] = train_sharded(SMALL, grid, **periodic(10**9, block_lr_ratio=1.0))
    outcomes["blockwise"] = train_sharded(SMALL, grid, strategy="blockwise")
    return {
        "values": {name: outcome.values for name, outcome in outcomes.items()},
        "ledgers": {every: ledger(grid, every) for every in (None, 1, 2)},
        "resumed": {name: resumed(case, grid) for name, case in CASES.items() if name != "absent"},
        "skipped": skipped(small, grid),
        "pipelined": pipelined(small, grid),
        "memory": memory(grid),
    }


def periodic(every: int, **own: Any) -> dict[str, Any]:
    """Return the options that make `DistributedMuon` periodic."""
    return {"strategy": "periodic", "strategy_options": {"whole_every": every, **own}}


def ledger(grid: Grid, every: int | None) -> list[dict[str, int]]:
    """Return what TP was sent in each of four steps, by label; every: None is owner."""
    options: dict[str, Any] = {"strategy": "owner"} if every is None else periodic(every)
    parameters, optimizer = build(SMALL, grid, **options)
    found = []
    for step in range(4):
        give(SMALL, grid, parameters, step)
        grid.ledger.clear()
        optimizer.step()
        found.append({entry.label: traffic.sent_bytes for entry, traffic in grid.ledger if entry.group == "tp"})
    return found


def resumed(case: Case, grid: Grid) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the parameters of a run of five steps, and of one that was saved after its second and loaded elsewhere."""
    parameters, optimizer = build(case, grid, strategy="periodic")
    go_on(case, grid, parameters, optimizer, range(2))
    file = saved(parameters, optimizer)
    go_on(case, grid, parameters, optimizer, range(2, 5))

    others, other = build(case, grid, strategy="periodic")
    go_on(case, grid, others, other, range(5, 6))  # so that it has a count to lose
    restore(file, others, other)
    go_on(case, grid, others, other, range(2, 5))
    return {name: (p.detach().clone(), others[name].detach().clone()) for name, p in parameters.items()}


def skipped(case: Case, grid: Grid) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the parameters of four steps, and of four with a bad number on the last rank before the third."""
    runs = []
    for bad in (False, True):
        parameters, optimizer = build(case, grid, strategy="periodic", on_nonfinite="skip")
        go_on(case, grid, parameters, optimizer, range(2))
        if bad:
            give(case, grid, parameters, 7)
            gradient = parameters["columns"].grad
            assert gradient is not None
            if grid.world.rank == grid.world.size - 1:
                gradient.view(-1)[0] = torch.nan
            optimizer.step()
            assert (optimizer.steps, optimizer.skipped_steps) == (2, 1)
        go_on(case, grid, parameters, optimizer, range(2, 4))
        runs.append(values(parameters))
    return {name: (value, runs[1][name]) for name, value in runs[0].items()}


def pipelined(case: Case, grid: Grid) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the parameters after four steps in order, and after four pipelined ones."""
    runs = []
    for make in (DistributedMuon, PipelinedMuon):
        parameters, optimizer = build(case, grid, make, strategy="periodic")
        go_on(case, grid, parameters, optimizer, range(4))
        runs.append(values(parameters))
    return {name: (value, runs[1][name]) for name, value in runs[0].items()}


def memory(grid: Grid) -> list[tuple[int, int]]:
    """Return (peak bytes, their bound) of a block step and of a whole one, of a deep MLP in many buckets."""
    model = MLP([64, *[128] * 12, 10], grid.tp)
    optimizer = DistributedMuon(split_parameters(model), grid, bucket_size=10_000, **periodic(3))
    found = []
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        with StorageTracker() as tracker:
            optimizer.step()
        if step:  # the first also makes the state, which stays
            found.append(tracker.peak)
    compute = dtype_name(fast_dtype(grid.device, torch.bfloat16))
    layout, muon = optimizer.buffers.layout, list(optimizer.muon)
    bound = predict_transient(layout, grid.tp.size, grid.dp.rank, muon, "periodic", compute_dtype=compute)
    return [(peak, bound) for peak in found]
