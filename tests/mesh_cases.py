"""A model with everything that is hard for MuonW, and the meshes on which PyTorch may put it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from optimizer_cases import made_up
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distmuon.launch import World
from distmuon.muonw.boxes import Box, boxes

Wrap = Callable[[World, Any], Any]


class Block(nn.Module):
    """A residual pair of maps that TP can cut, between them an activation."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Everything that is hard: uneven rows, fewer rows than ranks, a bias, a norm, a table, experts, kernels, heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8, 12) for _ in range(2))
        self.odd = nn.Linear(8, 7, bias=False)
        self.short = nn.Linear(7, 2, bias=False)
        self.experts = nn.Parameter(torch.zeros(5, 4, 6))
        self.kernel = nn.Parameter(torch.zeros(6, 2, 3, 3))
        self.fused = nn.Parameter(torch.zeros(16, 6))
        self.head = nn.Linear(2, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        extra = self.experts.sum() + self.kernel.sum() + self.fused.sum()
        return self.head(self.short(torch.relu(self.odd(x)))) + extra


GROUPS: dict[str, dict[str, Any]] = {  # name of a parameter -> its options
    "experts": {"matrices": "stacked", "lr": 0.05},
    "kernel": {"matrices": "flattened", "momentum_kind": "average", "nesterov": False},
    "fused": {"matrices": ("fused", ((8, 2), 4, 4)), "scale": "original"},
}
ADAMW = ("embedding.weight", "head.weight", "head.bias")


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    muon = [n for n, p in named.items() if p.ndim == 2 and n not in ADAMW and n not in GROUPS]
    rest = [n for n in named if n not in muon and n not in GROUPS]
    return [
        {"params": [(n, named[n]) for n in muon], "algorithm": "muon", "lr": 0.02},
        {"params": [(n, named[n]) for n in rest], "algorithm": "adamw", "lr": 0.01},
        *({"params": [(n, named[n])], "algorithm": "muon", **options} for n, options in GROUPS.items()),
    ]


def start(model: nn.Module) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(made_up(f"start {name}", p.shape, p.dtype))


def gradient(name: str, shape: torch.Size, step: int, dtype: torch.dtype) -> Tensor:
    return made_up(f"{name} {step}", shape, dtype)


# ---- Meshes -----------------------------------------------------------------------------------------------


def plain(world: World, model: nn.Module) -> Any:
    return model


def fsdp(world: World, model: Net) -> Any:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def along_columns(world: World, model: Net) -> Any:
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))

    def place(p: nn.Parameter) -> Shard:
        return Shard(1 if p.ndim >= 2 and p.shape[1] % world.size == 0 else 0)

    return fully_shard(model, mesh=mesh, shard_placement_fn=place)


def hybrid(world: World, model: Net) -> Any:
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def with_tp(world: World, model: Net) -> Any:
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


WRAPS: dict[str, Wrap] = {
    "fsdp": fsdp, "columns": along_columns, "hybrid": hybrid, "tp": with_tp,
}  # fmt: skip


def own_box(p: DTensor) -> Box:
    mesh: DeviceMesh = p.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    place = 0
    for at, size in zip(coordinate, mesh.mesh.shape, strict=True):
        place = place * size + at
    return boxes(tuple(p.shape), tuple(mesh.mesh.shape), p.placements)[place]


def cut(whole: Tensor, p: Tensor) -> Tensor:
    """Return what this rank should hold of a whole tensor."""
    return whole[tuple(side.as_slice for side in own_box(p))] if isinstance(p, DTensor) else whole


def give(model: nn.Module, step: int, absent: tuple[str, ...] = ()) -> None:
    for name, p in model.named_parameters():
        whole = gradient(name, p.shape, step, p.dtype)
        if name in absent:
            p.grad = None
        elif isinstance(p, DTensor):
            options: dict[str, Any] = dict(run_check=False, shape=p.shape, stride=p.stride())
            p.grad = DTensor.from_local(cut(whole, p).contiguous(), p.device_mesh, p.placements, **options)
        else:
            p.grad = whole
