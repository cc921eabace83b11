"""Two pipeline stages of 1 x 2 or 2 x 1 ranks, with an optimizer each: do they clip, skip and refuse as one model?

A stage has layers of its own. Gradients are set by hand, so a pipeline's schedule is not needed to know what is right.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import check, check_each
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


def trained(model: nn.Module, optimizer: Any, first: int, by: str) -> list[float]:
    """Train with clipping, by "max_norm" or by a "call"; return the norms."""
    norms = []
    for step in range(STEPS):
        set_gradients(model, first, step)
        norm = optimizer.clip_grad_norm_(1.0).item() if by == "call" else None
        optimizer.step()
        norms.append(optimizer.statistics.norm if norm is None else norm)
    return norms


CLIPPED = {
    "muon, by max_norm, under TP": ("muon", "max_norm", 2),
    "muon, by a call": ("muon", "call", 1),
    "adamw, by max_norm": ("adamw", "max_norm", 1),
}


@check_each(CLIPPED)
def two_stages_clip_as_the_whole_model_does(world: World, choice: str) -> None:
    kind, by, tp = CLIPPED[choice]
    options = {"max_norm": 1.0} if by == "max_norm" else {}
    mesh = mesh_of(world, tp)
    stage, grid = mesh.get_local_rank("pp"), Grid.of(mesh["dp", "tp"]).with_stages(mesh.get_group("pp"))
    model, whole = layers(stage), nn.ModuleList([*layers(0), *layers(1)])
    norms = trained(model, optimizer_of(kind, model, grid, **options), first := stage * 2 * LAYERS, by)
    expected = trained(whole, optimizer_of(kind, whole, Grid.alone(), **options), 0, by)
    assert min(expected) > 1.0  # something is clipped
    assert norms == pytest.approx(expected, rel=1e-12)
    by_rank = [norms] * world.size
    dist.all_gather_object(by_rank, norms)
    assert by_rank == [norms] * world.size  # to the bit, or replicas would drift
    for p, theirs in zip(model.parameters(), [*whole.parameters()][first:], strict=False):
        torch.testing.assert_close(p, theirs, rtol=1e-5, atol=1e-6)
    assert grid.ledger.total(group="pp").sent_bytes > 0


@check
def stages_of_fsdp2_clip_by_one_norm_too(world: World) -> None:
    mesh = mesh_of(world, 1)["pp", "dp"]
    stage = mesh.get_local_rank("pp")
    model = nn.Sequential(*layers(stage))
    fully_shard(model, mesh=mesh["dp"])
    placed: dict[int, Any] = dict(enumerate(model.parameters(), stage * 2 * LAYERS))
    optimizer = MuonW(model)
    for number, p in placed.items():
        p.grad = distribute_tensor(gradient(p, number, 0), p.device_mesh, p.placements)
    norm = optimizer.clip_grad_norm_(1.0, stages=mesh.get_group("pp")).item()
    both = enumerate(p for other in (0, 1) for p in layers(other).parameters())
    squares = sum(float(gradient(p, number, 0).double().square().sum()) for number, p in both)
    assert norm == pytest.approx(math.sqrt(squares))
    for number, p in placed.items():
        torch.testing.assert_close(p.grad.full_tensor(), gradient(p, number, 0) / (norm + 1e-6))
    optimizer.step()


HEARD = {  # what stage 0 alone has -> what its ranks hear, and those of stage 1
    "not finite": ("NonFiniteGradient: the gradient of 0.weight", "NonFiniteGradient: a gradient of another pipeline"),
    "skipped": ("", ""),
    "another norm": ("RankMismatchError: the stages", "RankMismatchError: the stages"),
    "steps": ("RankMismatchError: the stages", "RankMismatchError: the stages"),
    "one rank's rate": ("RankMismatchError: the options", "RankMismatchError: the stages"),
    "a replica": ("RankMismatchError: the values of '0.weight'", "RankMismatchError: the stages"),
    "refused": ("ValueError: lr=0.1", "RankMismatchError: the stages"),
}


@check_each(HEARD)
def what_one_stage_cannot_do_all_leave_undone(world: World, choice: str) -> None:
    mesh = mesh_of(world, 1)
    stage, grid = mesh.get_local_rank("pp"), Grid.of(mesh["dp", "tp"]).with_stages(mesh.get_group("pp"))
    model = layers(stage)
    options: dict[str, Any] = {"on_nonfinite": "skip"} if choice == "skipped" else {}
    if choice == "another norm":
        options["max_norm"] = 1.0 + stage
    optimizer = optimizer_of("muon", model, grid, **options)
    set_gradients(model, 2 * stage * LAYERS, 0)
    if stage == 0:
        spoil(choice, model, optimizer, mesh.get_local_rank("dp"))
    before = [p.detach().clone() for p in model.parameters()]
    said = ""
    try:
        optimizer.step()
    except (NonFiniteGradient, RankMismatchError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    assert said.startswith(HEARD[choice][stage]), said
    assert bool(said) == (choice != "skipped")
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert optimizer.skipped_steps == (choice == "skipped")


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
