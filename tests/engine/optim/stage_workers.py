"""Two pipeline stages of 1 x 2 or 2 x 1 ranks, with an optimizer each: do they clip, skip and refuse as one model?

A stage has layers of its own. Gradients are set by hand, so a pipeline's schedule is not needed to know what is right.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from distmuon import DistributedMuon, MuonW, NonFiniteGradient, RankMismatchError, Zero1AdamW
from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import mark_replicated

LAYERS = 2  # of each stage
STEPS = 3


def layers(stage: int) -> nn.ModuleList:
    """Return a stage's layers; those of stage 1 follow those of stage 0 in the whole model."""
    found = nn.ModuleList()
    for number in range(stage * LAYERS, (stage + 1) * LAYERS):
        torch.manual_seed(number)
        found.append(nn.Linear(8, 8))
    mark_replicated(found)
    return found


def gradient(p: Tensor, number: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + step)
    return torch.randn(p.shape, generator=generator) * (step + 1)


def optimizer_of(kind: str, model: nn.Module, grid: Grid, **options: Any) -> Any:
    named = list(model.named_parameters())
    if kind == "adamw":
        return Zero1AdamW(named, grid, lr=0.1, **options)
    groups = [
        {"params": [(name, p) for name, p in named if (p.ndim == 2) == (algorithm == "muon")], "algorithm": algorithm}
        for algorithm in ("muon", "adamw")
    ]
    return DistributedMuon(groups, grid, lr=0.1, **options)


def set_gradients(model: nn.Module, first: int, step: int) -> None:
    for number, p in enumerate(model.parameters(), first):
        p.grad = gradient(p, number, step)


def mesh_of(world: World, tp: int) -> Any:
    return init_device_mesh("cpu", (2, world.size // 2 // tp, tp), mesh_dim_names=("pp", "dp", "tp"))


def clipped(world: World, kind: str, tp: int, by: str) -> dict[str, Any]:
    """Train both stages with clipping; return norms, and parameters by their number in the whole model.

    by: "max_norm", or "call" of clip_grad_norm_.
    """
    mesh = mesh_of(world, tp)
    stage = mesh.get_local_rank("pp")
    grid = Grid.of(mesh["dp", "tp"]).with_stages(mesh.get_group("pp"))
    model = layers(stage)
    optimizer = optimizer_of(kind, model, grid, max_norm=1.0 if by == "max_norm" else None)
    return trained(model, optimizer, stage * 2 * LAYERS, by) | {"sent": grid.ledger.total(group="pp").sent_bytes}


def alone(world: World, kind: str, by: str) -> dict[str, Any]:
    """Train the whole model in one process."""
    model = nn.ModuleList([*layers(0), *layers(1)])
    return trained(model, optimizer_of(kind, model, Grid.alone(), max_norm=1.0 if by == "max_norm" else None), 0, by)


def trained(model: nn.Module, optimizer: Any, first: int, by: str) -> dict[str, Any]:
    norms = []
    for step in range(STEPS):
        set_gradients(model, first, step)
        norm = optimizer.clip_grad_norm_(1.0).item() if by == "call" else None
        optimizer.step()
        norms.append(optimizer.statistics.norm if norm is None else norm)
    return {"norms": norms, "parameters": {n: p.detach().clone() for n, p in enumerate(model.parameters(), first)}}


def muonw_clipped(world: World) -> dict[str, Any]:
    """Clip two stages of FSDP2; return the norm, and gradients by their number in the whole model."""
    mesh = mesh_of(world, 1)["pp", "dp"]
    stage = mesh.get_local_rank("pp")
    model = nn.Sequential(*layers(stage))
    fully_shard(model, mesh=mesh["dp"])
    optimizer, first, whole = MuonW(model), stage * 2 * LAYERS, dict[int, Tensor]()
    placed: list[Any] = list(model.parameters())
    for number, p in enumerate(placed, first):
        p.grad = distribute_tensor(gradient(p, number, 0), p.device_mesh, p.placements)
    norm = optimizer.clip_grad_norm_(1.0, stages=mesh.get_group("pp"))
    for number, p in enumerate(placed, first):
        whole[number] = p.grad.full_tensor()
    optimizer.step()
    return {"norm": norm.item(), "gradients": whole}


def stage_facts(world: World, differences: list[str]) -> dict[str, Any]:
    return {what: not_alike(world, what) for what in differences}


def not_alike(world: World, what: str) -> dict[str, Any]:
    """Let stage 0 alone have something that is not right; return what every rank heard, and whether it moved."""
    mesh = mesh_of(world, 1)
    stage = mesh.get_local_rank("pp")
    grid = Grid.of(mesh["dp", "tp"]).with_stages(mesh.get_group("pp"))
    model = layers(stage)
    options: dict[str, Any] = {"on_nonfinite": "skip"} if what == "skipped" else {}
    if what == "another norm":
        options["max_norm"] = 1.0 + stage
    optimizer = optimizer_of("muon", model, grid, **options)
    set_gradients(model, 2 * stage * LAYERS, 0)
    if stage == 0:
        spoil(what, model, optimizer, mesh.get_local_rank("dp"))
    before = [p.detach().clone() for p in model.parameters()]
    said = ""
    try:
        optimizer.step()
    except (NonFiniteGradient, RankMismatchError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    moved = any(not torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    return {"stage": stage, "said": said, "moved": moved, "skipped": optimizer.skipped_steps}


def spoil(what: str, model: nn.Module, optimizer: Any, dp_rank: int) -> None:
    if what in ("not finite", "skipped") and dp_rank == 0:
        weight = next(model.parameters())
        assert weight.grad is not None
        weight.grad[0, 0] = math.nan
    elif what == "one rank's rate" and dp_rank == 0:
        optimizer.param_groups[0]["lr"] = 0.2
    elif what == "a replica" and dp_rank == 0:
        with torch.no_grad():
            next(model.parameters()).add_(1)
    elif what == "refused":
        optimizer.param_groups[0]["momentum"] = 2.0
    elif what == "steps":
        optimizer.steps += 1
