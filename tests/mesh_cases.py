"""A model with everything that is hard for MuonW, and the meshes on which PyTorch may put it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from optimizer_cases import synthetic
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distmuon.launch import World
from muon_conformance import placements

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
    "experts": {
        "matrices": "stacked",
        "lr": 0.05,
        "input_norm": "rows",
        "output_norm": "columns_rows",
        "normuon_beta2": 0.8,
    },
    "kernel": {
        "matrices": "flattened",
        "momentum_kind": "average",
        "nesterov": False,
        "cautious_decay": True,
        "normuon_beta2": 0.0,
    },
    "fused": {"matrices": ("fused", ((8, 2), 4, 4)), "scale": "original", "normuon_beta2": 0.95},
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
            p.copy_(synthetic(f"start {name}", p.shape, p.dtype))


def gradient(name: str, shape: torch.Size, step: int, dtype: torch.dtype) -> Tensor:
    return synthetic(f"{name} {step}", shape, dtype)


# ---- Meshes -----------------------------------------------------------------------------------------------


def plain(world: World, model: Any) -> Any:
    return model


def wrapping(wrap: placements.Wrap) -> Wrap:
    def wrapped(world: World, model: Any) -> Any:
        wrap(world, model)
        return model

    return wrapped


def with_experts(world: World, model: Any) -> Any:
    """FSDP2 over all ranks, but for a block on another mesh of them, which two ranks cut first, as they do experts."""
    mesh = init_device_mesh(world.device, (world.size // 2, 2), mesh_dim_names=("dp_mod_ep", "ep"))
    experts, *others = model.blocks
    parallelize_module(experts, mesh["ep"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(experts, mesh=mesh["dp_mod_ep"])
    flat = init_device_mesh(world.device, (world.size,), mesh_dim_names=("dp",))
    for block in others:
        fully_shard(block, mesh=flat)
    fully_shard(model, mesh=flat)
    return model


fsdp = wrapping(placements.fsdp)
WRAPS: dict[str, Wrap] = {
    "fsdp": fsdp,
    "columns": wrapping(placements.along_columns),
    "hybrid": wrapping(placements.hybrid),
    "tp": wrapping(placements.with_tp),
    "experts": with_experts,
}


def give(model: nn.Module, step: int, absent: tuple[str, ...] = ()) -> None:
    for name, p in model.named_parameters():
        if name in absent:
            p.grad = None
        else:
            placements.give(p, gradient(name, p.shape, step, p.dtype))
