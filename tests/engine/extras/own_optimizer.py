"""An optimizer that is not ours: momentum and updates sharded over all ranks, as somebody might write it in an evening.

Every rank keeps an equal run of each flat parameter, padded at the end, and its momentum. All that checkpoints, metrics
and QK-Clip get to know of it is its method `local_views`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmuon import AttentionHeads, LocalView, MuonW, QKClip
from distmuon.checkpoint import CheckpointError, load, save
from distmuon.launch import World
from distmuon.metrics import Metrics
from distmuon.sharding.layout import Range
from distmuon.sharding.tensor_parallel import mark

BEFORE, AFTER = 2, 2  # steps
DTYPES = (torch.float32, torch.bfloat16)


class ShardedMomentum(torch.optim.Optimizer):
    """w <- (1 - lr * weight_decay) w - lr m, with m <- momentum m + g. Gradients are alike on all ranks."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.shards = {p: self._shard(p.detach()).float().clone() for g in self.param_groups for p in g["params"]}
        for p, shard in self.shards.items():
            if p.dtype != torch.float32:
                self.state[p]["master_weight"] = shard
        self.used = dict[Tensor, Tensor]()

    def run(self, p: Tensor) -> Range:
        length = math.ceil(p.numel() / self.size)
        return Range(min(p.numel(), length * self.rank), min(p.numel(), length * (self.rank + 1)))

    def _shard(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[self.run(whole).as_slice]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.used.clear()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                shard, gradient = self.shards[p], self._shard(p.grad).float()
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(shard))
                momentum.mul_(group["momentum"]).add_(gradient)
                shard.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum, alpha=group["lr"])
                self.used[p] = gradient
                p.copy_(self._gathered(p))

    def _gathered(self, p: Tensor) -> Tensor:
        if self.size == 1:
            return self.shards[p].view(p.shape)
        length = math.ceil(p.numel() / self.size)
        mine = torch.zeros(length)
        mine[: len(self.shards[p])] = self.shards[p]
        whole = torch.empty(length * self.size)
        dist.all_gather_into_tensor(whole, mine)
        return whole[: p.numel()].view(p.shape)

    def local_views(self) -> list[LocalView]:
        return [
            LocalView.of_run(f"{number}", p, self.shards[p], self.run(p).start, gradient=self.used.get(p))
            for number, p in enumerate(self.shards)
        ]


def training(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, ShardedMomentum]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
    return model, ShardedMomentum(model.parameters(), lr=0.1)


def go(model: nn.Module, optimizer: ShardedMomentum, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def go_on(world: World, folder: str, begin: bool = False) -> list[Tensor]:
    """Save after some steps, or load what has been saved; return where some steps more lead, in either dtype."""
    ends: list[Tensor] = []
    for dtype in DTYPES:
        model, optimizer = training(dtype)
        if begin:
            go(model, optimizer, range(BEFORE))
            optimizer.param_groups[0]["lr"] = 0.05
            save(f"{folder}/{dtype}", model, optimizer)
        else:
            go(model, optimizer, range(7, 8))  # it has been elsewhere
            load(f"{folder}/{dtype}", model, optimizer)
        go(model, optimizer, range(BEFORE, BEFORE + AFTER))
        ends += [p.detach().clone() for p in model.parameters()]
    return ends


def observed(world: World) -> dict[str, Any]:
    model, optimizer = training()
    with Metrics(optimizer, every=1) as metrics:
        go(model, optimizer, range(2))
        found = metrics.latest
    return {"totals": found["totals"], "parameters": found["parameters"]}


def save_tp_local(world: World, folder: str) -> list[str]:
    """Try to save TP-local tensors without an optimizer, and with one that knows of no grid."""
    model = nn.Linear(4, 4, bias=False)
    model.weight = mark(nn.Parameter(torch.zeros(4, 4)), 0)
    return [refusal(folder, model, optimizer) for optimizer in (None, MuonW(model))]


class Projections(nn.Module):
    """Query and key of 4 heads of width 2, whose rows are no multiple of what a rank of three keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(5, 8), nn.Linear(5, 8)


def clipped(world: World, threshold: float = 0.5) -> dict[str, Any]:
    """Clip heads in a step that moves the weights, and step once more; return the weights after both, in either dtype.

    Three batches of queries and keys are spread over the ranks. shards: what this rank keeps, after the first step.
    """
    found: dict[str, Any] = {"weights": [], "shards": []}
    for dtype in DTYPES:
        torch.manual_seed(0)
        model = Projections().to(dtype)
        optimizer = ShardedMomentum(model.parameters(), lr=0.1)
        clip = QKClip(optimizer, {"layer": AttentionHeads(model.query, model.key, 4)}, threshold)
        q, k = torch.randn(2, 4, 6, 2), torch.randn(2, 4, 6, 2)
        sizes = torch.tensor([1.0, 0.02, 1.0, 3.0]).view(4, 1, 1)
        for step in range(2):
            for batch in range(world.rank, 3, world.size) if step == 0 else ():
                clip.record("layer", q * (batch + 1) * sizes, k)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that nothing is recorded in the second step
                go(model, optimizer, range(step, step + 1))
            found["weights"] += [p.detach().clone() for p in model.parameters()]
            if step == 0:
                found["gammas"] = clip.gammas["layer"]
                found["shards"] += [shard.clone() for shard in optimizer.shards.values()]
    return found


def keeps_masters_to_itself(world: World, folder: str) -> str:
    model, optimizer = training(torch.bfloat16)
    optimizer.state.clear()
    return refusal(folder, model, optimizer)


def refusal(folder: str, model: nn.Module, optimizer: Any) -> str:
    try:
        save(folder, model, optimizer)
    except CheckpointError as error:
        return str(error)
    return "saved"
