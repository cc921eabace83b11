"""What every rank runs for tests/test_museum.py: one small training per exhibit and scenario, in a single world."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distmuon.distributed_muon import DistributedMuon
from distmuon.grid import Grid
from distmuon.launch import World
from distmuon.layout import ParamSpec, plan
from distmuon.ledger import Ledger
from distmuon.muon import Muon
from distmuon.museum import EXHIBITS, broken
from distmuon.prediction import predict_step
from distmuon.tensor_parallel import load_slices, mark, whole_parameters

DP, TP, STEPS = 2, 2, 3
BUCKET_SIZE = 160  # two buckets, an odd number of elements in each: both are padded
# whole shape and tp_split_dim. `rows` and `other` straddle the shard boundary. `rows`, where a 1-D view raises, is on
# all ranks: were it on some of them only, the others would wait for those in vain.
SHAPES: dict[str, tuple[tuple[int, int], int | None]] = {
    "columns": ((12, 10), 0),
    "rows": ((9, 16), 1),
    "whole": ((7, 5), None),
    "other": ((7, 9), None),
}


class Scenario(NamedTuple):
    """groups: names per Muon group; the first learns ten times as fast. scale: of the gradients. steps: to train."""

    groups: tuple[tuple[str, ...], ...] = (("columns", "rows", "whole", "other"),)
    micro_batches: int = 1
    scale: float = 1.0
    steps: int = STEPS


SCENARIOS = {
    "one group": Scenario(),
    "two groups": Scenario(groups=(("columns", "rows"), ("whole", "other"))),
    "two micro-batches": Scenario(micro_batches=2),
    "loud gradients": Scenario(scale=2.0**20),
    "first step": Scenario(steps=1),
}


def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in SHAPES.items()}


def gradients(scenario: Scenario, step: int, dp_rank: int, micro: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * dp_rank + micro + 1)
    return {n: torch.randn(shape, generator=generator) * scenario.scale for n, (shape, _) in SHAPES.items()}


def options(position: int) -> dict[str, float]:
    return {"lr": 0.1 ** (position + 1), "weight_decay": 0.1}


def on_grid(name: str | None, scenario: Scenario, grid: Grid) -> tuple[dict[str, Tensor], Ledger]:
    """Return whole parameters and ledger with exhibit `name`, or with the healthy code."""
    model = nn.ParameterDict()
    for key, (shape, dim) in SHAPES.items():
        local = [size // grid.tp.size if axis == dim else size for axis, size in enumerate(shape)]
        model[key] = mark(nn.Parameter(torch.empty(local)), dim if grid.tp.size > 1 else None)
    load_slices(model, initial(), grid.tp)
    groups = [
        {"params": [(key, model[key]) for key in keys]} | options(position)
        for position, keys in enumerate(scenario.groups)
    ]
    make: Any = DistributedMuon if name is None else lambda *given, **more: broken(name, *given, **more)
    optimizer = make(groups, grid, bucket_size=BUCKET_SIZE, batched=False)
    grid.ledger.clear()
    for step in range(scenario.steps):
        for micro in range(scenario.micro_batches):
            for key, gradient in gradients(scenario, step, grid.dp.rank, micro).items():
                dim = SHAPES[key][1]
                mine = gradient if dim is None else gradient.chunk(grid.tp.size, dim)[grid.tp.rank]
                (model[key] * mine).sum().backward()
        optimizer.step()
    ledger = copy.deepcopy(grid.ledger)
    return whole_parameters(model, replace(grid.tp, ledger=Ledger())), ledger


def alone(scenario: Scenario, dp: int = DP) -> dict[str, Tensor]:
    """Return the parameters of single-device Muon; gradients are added in the order in which the ranks add them."""
    parameters = {key: nn.Parameter(value) for key, value in initial().items()}
    groups = [{"params": [parameters[k] for k in keys]} | options(p) for p, keys in enumerate(scenario.groups)]
    optimizer = Muon(groups, input_dtype=torch.bfloat16, batched=False)
    for step in range(scenario.steps):
        for key, parameter in parameters.items():
            shares = [
                sum(gradients(scenario, step, rank, micro)[key] for micro in range(scenario.micro_batches))
                for rank in range(dp)
            ]
            parameter.grad = torch.as_tensor(sum(shares)) / dp
        optimizer.step()
    return {key: parameter.detach() for key, parameter in parameters.items()}


def predicted(scenario: Scenario, grid: Grid) -> Ledger:
    """Return the ledger that the healthy code will have filled on this rank."""
    shapes = {n: [m // TP if a == dim else m for a, m in enumerate(shape)] for n, (shape, dim) in SHAPES.items()}
    specs = [ParamSpec(name, tuple(shape), "float32", SHAPES[name][1]) for name, shape in shapes.items()]
    ledger = Ledger()
    ledger.add(predict_step(plan(specs, DP, BUCKET_SIZE), TP, grid.dp.rank, range(len(specs))), scenario.steps)
    return ledger


def visit(world: World) -> dict[tuple[str | None, str], Any]:
    """Return, per exhibit (None: the healthy code) and scenario: whole parameters, and how bytes differ from predicted.

    A string in their place is the error. It reads the same on all ranks, or they would not meet again afterwards.
    """
    grid = Grid.of(world)
    found: dict[tuple[str | None, str], Any] = {}
    for name in (None, *EXHIBITS):
        for label, scenario in SCENARIOS.items():
            try:
                parameters, ledger = on_grid(name, scenario, grid)
                found[name, label] = parameters, ledger.differences(predicted(scenario, grid))
            except (IndexError, RuntimeError) as error:
                found[name, label] = f"{type(error).__name__}: {error}"
    return found
