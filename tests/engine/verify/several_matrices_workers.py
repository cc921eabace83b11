"""What every rank of a grid finds out about parameters that hold several matrices each."""

from __future__ import annotations

from typing import Any

import optimizer_cases
import pytest
import torch
from optimizer_cases import Case, build, go_on, restore, saved, several, train_sharded, values
from torch import nn

from distmuon.launch import World
from distmuon.optim import strategies
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.overlap import PipelinedMuon
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import mark

DTYPES = {"float32": (torch.float32,), "mixed": (torch.bfloat16, torch.float32), "float64": (torch.float64,)}
IN_BLOCKS = ("blockwise", "periodic")  # other optimizers than Muon; the second in the few steps made here
LATE = ("experts", "qkv", "whole query")  # nobody's gradient in the first step
NEVER = "whole kernel"


def case_of(dtype: str, tp: int) -> Case:
    return several(tp).of_dtype(*DTYPES[dtype])


def absent(tp: int, rows: bool = True) -> Case:
    """Return the case with gradients that come late, or never, or not on every rank; with NorMuon, if not told else."""
    case = several(tp, rows=rows)
    missing = {(name, 0, rank) for name in LATE for rank in range(8)}
    missing |= {(NEVER, step, rank) for step in range(case.steps) for rank in range(8)}
    return Case(case.weights, case.groups, case.steps, case.bucket_size, None, frozenset(missing | {("query", 1, 0)}))


def facts(world: World) -> dict[str, Any]:
    grid = Grid.of(world)
    tp, found = grid.tp.size, {}
    for strategy in strategies.names():
        for dtype in DTYPES:
            found[strategy, dtype] = train_sharded(case_of(dtype, tp), grid, strategy=strategy).values
        found[strategy, "absent"] = train_sharded(absent(tp, strategy not in IN_BLOCKS), grid, strategy=strategy).values
        found[strategy, "batched"] = train_sharded(case_of("float64", tp), grid, strategy=strategy, batched=True).values
    found["owner", "updates"] = train_sharded(several(tp), grid, strategy="owner", publish="updates").values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_cases, "DistributedMuon", PipelinedMuon)
        for strategy in ("gather_all", "owner"):
            found[strategy, "pipelined"] = train_sharded(several(tp), grid, strategy=strategy).values
    return {
        "values": found,
        "resumed": {name: resume(grid, name) for name in ("gather_all", "owner")},
        "refused": refused(grid),
    }


def refused(grid: Grid) -> str:
    """Return what is said of three heads on a TP row."""
    weight = mark(nn.Parameter(torch.zeros(12 // grid.tp.size, 4)), 0)
    try:
        DistributedMuon([("query", weight)], grid, matrices=("rows", 3))
    except ValueError as refusal:
        return str(refusal)
    return ""


def resume(grid: Grid, strategy: str) -> bool:
    """Return whether a run that was saved after two steps and loaded goes on to the bit."""
    case = absent(grid.tp.size)
    runs = [build(case, grid, strategy=strategy) for _ in range(2)]
    go_on(case, grid, *runs[0], range(2))
    restore(saved(*runs[0]), *runs[1])
    for parameters, optimizer in runs:
        go_on(case, grid, parameters, optimizer, range(2, 3))
    ours, theirs = (values(parameters) for parameters, _ in runs)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)
