"""The matrices of a reader's own model: how owners would pad them, and what a step with them really sends.

block: {name: shape [rows, columns] of a matrix}, of one block, in whole; blocks: how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch.nn import Parameter

from distmuon import launch
from distmuon.launch import World
from distmuon.optim import strategies
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ParamSpec
from distmuon.sharding.tensor_parallel import mark
from muonbook.baselines import TITLES
from muonbook.planner.planned_worlds import BUCKET_RULES
from muonbook.runnable_baselines import FLAT, MUON_LAYOUTS

COUNTED = ("muon", "muon_flat", "muon_cut", "muon_owner")
megatron = BUCKET_RULES["megatron"]  # D -> elements of a bucket
Block = Mapping[str, tuple[int, int]]


def matrices(block: Block, blocks: int, T: int) -> list[ParamSpec]:
    """Return the part of each matrix that one of T TP ranks holds, cut along its rows."""
    cut = 0 if T > 1 else None
    return [
        ParamSpec(f"{number}.{name}", (rows // T, columns), "float32", tp_split_dim=cut)
        for number in range(blocks)
        for name, (rows, columns) in block.items()
    ]


def padding(specs: list[ParamSpec], D: int, T: int, bucket: int) -> float:
    """Return p of the owner layout: how long its shards are, all together, over the matrices in them."""
    lay_out = strategies.planner("owner")
    return 1 + lay_out(specs, muon=range(len(specs)), dp=D, tp=T, bucket_size=bucket).padding


def bytes_of_a_step(grid: Grid, specs: list[ParamSpec], strategy: str, bucket: int) -> int:
    """Let this rank take a step, and return what its ledger has, without the gradient's norm."""
    parameters = [mark(Parameter(torch.randn(spec.shape)), spec.tp_split_dim) for spec in specs]
    make = Zero1AdamW if strategy == "adamw" else partial(DistributedMuon, strategy=strategy)
    optimizer = make(parameters, grid, bucket_size=bucket)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    grid.ledger.clear()
    optimizer.step()
    return sum(traffic.sent_bytes for entry, traffic in grid.ledger if entry.op != "all_reduce")


def count_on_rank(world: World, specs: list[ParamSpec], bucket: int) -> dict[str, int]:
    """Return {layout's title: bytes that this rank sends in a step}, AdamW's under "adamw"."""
    grid, found = Grid.of(world), {}
    for name in COUNTED:
        layout = MUON_LAYOUTS[name]
        found[TITLES[name]] = bytes_of_a_step(grid, specs, layout.strategy, layout.elements or bucket)
    return found | {"adamw": bytes_of_a_step(grid, specs, "adamw", FLAT)}


def count(block: Block, blocks: int, D: int, T: int, bucket: int) -> dict[str, float]:
    """Return {layout's title: bytes / ZeRO-1 AdamW's} of steps that D x T processes take, in the paper's dtypes."""
    ranks = launch.run(count_on_rank, (matrices(block, blocks, T), bucket), dp=D, tp=T)
    sent = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    adamw = sent.pop("adamw")
    return {name: size / adamw for name, size in sent.items()}


def print_ratios(heading: str, grids: Mapping[tuple[int, int], Mapping[str, float]]) -> None:
    """Print a row per layout and a column per grid. grids: {(D, T): {layout: bytes / ZeRO-1 AdamW's}}."""
    print(f"{heading:20}" + "".join(f"{D:5} x {T}" for D, T in grids))
    for name in next(iter(grids.values())):
        print(f"{name:20}" + "".join(f"{ratios[name]:9.3f}" for ratios in grids.values()))
