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
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.overlap import PipelinedMuon
from distmuon.sharding.grid import Grid

PERIODIC = (MUON | {"whole_every": 3}, OTHER_MUON | {"whole_every": 2, "block_lr_ratio": 0.7}, SMALL.groups[2])
CASES: dict[str, Case] = {  # of four steps, in which the first group is whole once, and the second twice
    "small": replace(SMALL, groups=PERIODIC),
    "bf16 and fp32": replace(SMALL.of_dtype(torch.bfloat16, torch.float32), groups=PERIODIC),
    "absent": replace(ABSENT, groups=PERIODIC),
}


def facts(world: launch.World) -> dict[str, Any]:
    grid = Grid.of(world)
    outcomes = {name: train_sharded(case, grid, strategy="periodic") for name, case in CASES.items()}
    small = CASES["small"]
    outcomes["one bucket"] = train_sharded(small, grid, strategy="periodic", bucket_size=10_000)
    outcomes["updates"] = train_sharded(small, grid, strategy="periodic", publish="updates")
    never = {"whole_every": 10**9, "block_lr_ratio": 1.0}
    outcomes["never"] = train_sharded(SMALL, grid, strategy="periodic", strategy_options=never)
    outcomes["blockwise"] = train_sharded(SMALL, grid, strategy="blockwise")
    return {
        "values": {name: outcome.values for name, outcome in outcomes.items()},
        "resumed": resumed(CASES["bf16 and fp32"], grid),
        "skipped": skipped(small, grid),
        "pipelined": pipelined(small, grid),
    }


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
    return side_by_side(values(parameters), values(others))


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
    return side_by_side(*runs)


def pipelined(case: Case, grid: Grid) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the parameters after four steps in order, and after four pipelined ones."""
    runs = []
    for make in (DistributedMuon, PipelinedMuon):
        parameters, optimizer = build(case, grid, make, strategy="periodic")
        go_on(case, grid, parameters, optimizer, range(4))
        runs.append(values(parameters))
    return side_by_side(*runs)


def side_by_side(some: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (value, others[name]) for name, value in some.items()}
