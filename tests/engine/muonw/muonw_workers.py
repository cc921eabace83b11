"""What every rank finds out about MuonW on the DTensors of FSDP2, of TP and of both."""

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
from distmuon.muonw.optimizer import MuonW
from distmuon.muonw.plans import local
from distmuon.sharding.agreement import Disagreement
from distmuon.verify.counter import CollectiveCounter

STEPS = 3
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


def train(world: World, wrap: Wrap, dtype: torch.dtype) -> tuple[nn.Module, MuonW, list[int]]:
    torch.manual_seed(0)
    net = Net().to(dtype)
    start(net)
    model = wrap(world, net)
    optimizer = MuonW(groups_of(model), batched=False)
    calls = []
    for step in range(STEPS):
        give(model, step, absent=("odd.weight",) if step == 1 else ())
        with CollectiveCounter() as counter:
            optimizer.step()
        calls.append(counter.ledger.total().calls)
    return model, optimizer, calls


def facts(world: World, wrap: str, dtype: str) -> dict[str, Any]:
    """Train the wrapped model and a plain one on the same gradients; return where they differ, and how many calls."""
    chosen = getattr(torch, dtype)
    model, optimizer, calls = train(world, WRAPS[wrap], chosen)
    reference, _, _ = train(world, plain, chosen)
    whole = dict(reference.named_parameters())
    begun = Net().to(chosen)
    start(begun)
    torch_agrees = {}
    fresh = Net().to(chosen)
    start(fresh)
    for name, p in WRAPS[wrap](world, fresh).named_parameters():
        torch_agrees[name] = torch.equal(local(p), cut(dict(begun.named_parameters())[name].detach(), p))
    pairs = {n: (local(p).detach(), cut(whole[n].detach(), p)) for n, p in model.named_parameters()}
    differ = [n for n, pair in pairs.items() if not torch.equal(*pair)]
    far = [n for n, pair in pairs.items() if not torch.allclose(*pair, rtol=2**-6, atol=2**-6)]
    assert optimizer._plans is not None
    (plan,) = optimizer._plans
    mine, every = ([(plan.parameters[i].name, n) for i, n in keys] for keys in (plan.parcels.mine, plan.parcels.owner))
    return {"differ": differ, "far": far, "calls": calls, "boxes": [n for n, same in torch_agrees.items() if not same],
            "told": optimizer.ledger.total().calls, "mine": mine, "all": every}  # fmt: skip


def disagree(world: World) -> str:
    """Let one rank have a gradient less; return what every rank says."""
    model = fsdp(world, Net())
    optimizer = MuonW(groups_of(model))
    give(model, 0, absent=("odd.weight",) if world.rank == 1 else ())
    try:
        optimizer.step()
    except Disagreement as error:
        return str(error)
    return "nothing"


def refuse_uneven_tp(world: World) -> str:
    """Cut 7 rows over 2 TP ranks and shard them; return what the first step says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Block(8, 7)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = MuonW(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "nothing"


def losses(world: World, wrap: str) -> list[float]:
    """Train on the same tokens on every rank, so that mean gradients are one process's; return the losses."""
    torch.manual_seed(0)
    net = Net()
    start(net)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.3)
    model = {"plain": plain, **WRAPS}[wrap](world, net)
    optimizer = MuonW(groups_of(model), batched=False)
    tokens = torch.arange(11)
    found = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 11)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def scaled_infinity(world: World) -> dict[str, Any]:
    """Under a GradScaler, let one rank's gradient be infinite in the second of three steps; say when weights moved."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    net = nn.Linear(6, 4)
    start(net)
    model: Any = fully_shard(net, mesh=mesh)
    optimizer, scaler = MuonW(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    moved = []
    for step in range(3):
        before = [local(p).clone() for p in model.parameters()]
        scaler.scale(model(made_up(f"{step}", (5, 6), torch.float32)).square().mean()).backward()
        if step == 1 and world.rank == 1:
            local(model.weight.grad).fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(not all(torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True)))
    return {"moved": moved, "scale": scaler.get_scale()}
