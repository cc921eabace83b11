"""What every rank finds out about QK-Clip: on the grids of DistributedMuon, and on the DTensors of FSDP2 and TP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mesh_cases import wrapping
from optimizer_cases import synthetic
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from distmuon.extras.qk_clip import LABEL, AttentionHeads, NonFiniteLogits, QKClip
from distmuon.launch import World
from distmuon.models.networks import Transformer, initial_weights
from distmuon.optim.muonw import MuonW
from distmuon.optim.overlap import OVERLAPS
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.collectives import Group
from distmuon.sharding.consistency import RankMismatchError
from distmuon.sharding.grid import Grid
from distmuon.sharding.local_views import local
from distmuon.sharding.tensor_parallel import load_slices, whole_parameters
from muon_conformance.placements import along_columns, held, hybrid

STEPS, BATCHES, TAU = 3, 2, 2.0
HEADS, WIDTH, LENGTH = 4, 12, 5
CASES: dict[str, dict[str, Any]] = {  # of DistributedMuon, each on 2 x 2 ranks; bf16 models have float32 masters
    "gather_all": {},
    "gather_cut": {"strategy": "gather_cut"},
    "owner": {"strategy": "owner", "publish": "updates"},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, owner, pipelined": {"dtype": torch.bfloat16, "strategy": "owner", "schedule": "pipelined"},
}


def integers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return whole numbers, whose products and sums are exact in any order."""
    return (3 * synthetic(name, torch.Size(shape), torch.float32)).round()


def queries_and_keys(name: str, step: int, batch: int, heads: int, key_heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Return [2, heads, length, width] and [2, key heads, length, width]; a batch's number makes it larger."""
    return (
        (1 + batch % 2) * integers(f"q {name} {step} {batch}", (2, heads, LENGTH, width)),
        integers(f"k {name} {step} {batch}", (2, key_heads, LENGTH, width)),
    )


# ---- DistributedMuon --------------------------------------------------------------------------------------


def on_grid(grid: Grid, case: str, batches: int = BATCHES) -> dict[str, Any]:
    """Make the steps of a case with given gradients and logits; return parameters, and what the clip says.

    batches: over all DP ranks. A rank records its own, one after the other, as micro-batches.
    """
    options = dict(CASES[case])
    dtype, schedule = options.pop("dtype", torch.float32), OVERLAPS[options.pop("schedule", "synchronous")]
    model = transformer(grid, dtype)
    optimizer = schedule(
        split_parameters(model), grid, lr=0.02, bucket_size=500, on_nonfinite="skip", batched=False, **options
    )
    clip = QKClip(optimizer, heads_of(model), TAU)
    touched, said = [], []
    for step in range(STEPS):
        for index in range(2 * batches):  # the last ones after a skipped step
            if step == 1 and index == batches:
                next(model.parameters()).grad = torch.full_like(next(model.parameters()), torch.inf)
                optimizer.step()
            if index % batches % grid.dp.size == grid.dp.rank and (step == 1 or index < batches):
                for name in clip.layers:
                    q, k = queries_and_keys(name, step, index, HEADS, HEADS, WIDTH // HEADS)
                    q, k = (tensor.chunk(grid.tp.size, 1)[grid.tp.rank] for tensor in (q, k))
                    clip.record(name, q, k)
        for name, p in model.named_parameters():
            whole = synthetic(f"{name} {step}", torch.Size(whole_shape(p, grid)), torch.float32)
            dim = p.tp_split_dim  # type: ignore[attr-defined]
            p.grad = (whole if dim is None else whole.chunk(grid.tp.size, dim)[grid.tp.rank]).to(dtype).contiguous()
        optimizer.step()
        touched.append(optimizer.statistics.touched)
        said.append((clip.largest, clip.gammas, clip.summary()))
    calls = sum(traffic.calls for entry, traffic in grid.ledger if entry.label == LABEL)
    seen = {"touched": touched, "said": said, "skipped": clip.skipped_steps, "calls": calls}
    return seen | {"whole": whole_parameters(model, grid.tp)}


def transformer(grid: Grid, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return the TP-local model with the same whole weights on every grid."""
    whole, model = (Transformer(7, WIDTH, 2, HEADS, LENGTH, tp) for tp in (Group("tp"), grid.tp))
    load_slices(model.to(dtype), initial_weights(whole, 0), grid.tp)
    return model


def heads_of(model: Transformer) -> dict[str, AttentionHeads]:
    blocks = dict(model.blocks.named_children())
    return {f"blocks.{i}": AttentionHeads(b.query, b.key, HEADS) for i, b in blocks.items()}  # type: ignore[arg-type]


def whole_shape(p: Tensor, grid: Grid) -> list[int]:
    return [n * grid.tp.size if dim == p.tp_split_dim else n for dim, n in enumerate(p.shape)]  # type: ignore[attr-defined]


def complaints(grid: Grid) -> dict[str, str]:
    """Return what every rank says where one of them differs, or has a NaN."""
    said = {}
    odd_one = grid.world.rank == 1

    def made(threshold: float = TAU, heads: int = HEADS) -> tuple[Any, QKClip]:
        model = transformer(grid)
        optimizer = OVERLAPS["synchronous"](split_parameters(model), grid)
        block: Any = model.blocks[0]
        return optimizer, QKClip(optimizer, {"block": AttentionHeads(block.query, block.key, heads)}, threshold)

    def hear(what: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except (RankMismatchError, NonFiniteLogits) as error:
            said[what] = f"{type(error).__name__}: {error}"

    hear("made with another threshold", lambda: made(threshold=3.0 if odd_one else TAU))
    hear("made with other heads", lambda: made(heads=2 if odd_one else HEADS))
    hear("made with wrong heads", lambda: made(heads=5 if odd_one else HEADS))
    optimizer, clip = made()
    clip.threshold = 3.0 if odd_one else TAU
    hear("threshold changed", optimizer.step)
    optimizer, clip = made()
    q, k = queries_and_keys("nan", 0, 0, HEADS // grid.tp.size, HEADS // grid.tp.size, WIDTH // HEADS)
    clip.record("block", q * (torch.nan if odd_one else 1.0), k)
    hear("a NaN", optimizer.step)
    if odd_one:  # a rank without data records nothing
        clip.record("block", 0 * q, k)
    optimizer.step()
    said["afterwards"] = str(clip.summary())
    return said


# ---- Meshes -----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention with biases, d = width / heads. watch: as in the models of the engine."""

    watch: Any = None

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.d = width // heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, self.d * key_heads), nn.Linear(width, self.d * key_heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            m(x).unflatten(-1, (-1, self.d)).transpose(1, 2).contiguous() for m in (self.query, self.key, self.value)
        )
        if self.watch is not None:
            self.watch(q, k)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Layers whose heads are cut in pieces, one of fewer rows than ranks, shared keys, fused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.grouped = Layer(12, 4, 4), Layer(12, 4, 2)
        self.down, self.tiny, self.up = nn.Linear(12, 2), Layer(2, 2, 2), nn.Linear(2, 12)
        self.fused = nn.Linear(12, 3 * 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.tiny(self.down(self.grouped(self.even(x))))) + self.fused(x)[..., :12]

    def attentions(self) -> dict[str, AttentionHeads]:
        return {
            "even": AttentionHeads(self.even.query, self.even.key, 4),
            "grouped": AttentionHeads(self.grouped.query, self.grouped.key, 4, 2),
            "tiny": AttentionHeads(self.tiny.query, self.tiny.key, 2),
            "fused": AttentionHeads(self.fused, self.fused, 4),
        }


def alone(world: World, net: Net) -> Any:
    return net


def fsdp(world: World, net: Net) -> Any:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    fully_shard(net.even, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def with_tp(world: World, net: Net) -> Any:
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    columns = {name: ColwiseParallel() for name in ("query", "key", "value")}
    for layer in (net.even, net.grouped):
        parallelize_module(layer, mesh["tp"], {**columns, "out": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["dp"])


WRAPS = {
    "alone": alone,
    "fsdp": fsdp,
    "columns": wrapping(along_columns),
    "hybrid": wrapping(hybrid),
    "tp": with_tp,
}


def started(world: World, wrap: str) -> tuple[Any, MuonW, QKClip]:
    """Return the wrapped net, its optimizer, which will not move it, and its clip."""
    net = Net()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(synthetic(f"start {name}", p.shape, p.dtype))
    model = WRAPS[wrap](world, net)
    optimizer = MuonW(model, lr=0.0, weight_decay=0.0)
    return model, optimizer, QKClip(optimizer, net.attentions(), TAU, grid=Grid.alone() if wrap == "alone" else None)


def on_mesh(world: World, wrap: str) -> dict[str, Any]:
    """Record given logits, other ones on every DP rank, and step; return where the clipped weights are not those of
    one process, bit by bit, and what all parameters are after a forward pass with its own logits."""
    ends: dict[str, Any] = {}
    for which in ("alone", wrap):
        model, optimizer, clip = started(world, which)
        tp = 2 if which == "tp" else 1
        replicas = world.size // 2 if wrap == "tp" else world.size
        place, mine = world.rank % tp, range(replicas) if which == "alone" else [world.rank // tp]
        for batch in mine:
            for name, layer in clip.layers.items():
                heads, keys = layer.attention.heads, layer.attention.keys
                q, k = queries_and_keys(name, 0, batch, heads, keys, layer.width)
                if name in ("even", "grouped"):
                    q, k = (tensor.chunk(tp, 1)[place] for tensor in (q, k))
                clip.record(name, q, k)
        optimizer.step()
        ends[which] = dict(model.named_parameters()), clip
    (whole, reference), (here, clip) = ends["alone"], ends[wrap]
    return {
        "differ": [n for n, p in here.items() if not torch.equal(local(p).detach(), held(whole[n].detach(), p))],
        "gammas": [n for n, g in clip.gammas.items() if not torch.equal(g, reference.gammas[n])],
        "clipped": {n: int((g < 1).sum()) for n, g in clip.gammas.items()},
        "empty": any(local(p).numel() == 0 for p in here.values() if isinstance(p, DTensor)),
        "calls": sum(t.calls for e, t in clip.ledger if e.label == LABEL),
    }


def mesh_forward(world: World, wrap: str) -> dict[str, Tensor]:
    """Run a forward and backward pass on half of the examples; return the largest logits of two watched layers."""
    model, optimizer, clip = started(world, wrap)
    names = ("even", "grouped", "tiny")
    clip.record("fused", *queries_and_keys("fused", 0, 0, 4, 4, 3))
    for name in names:
        getattr(model, name).watch = clip.recorder(name)
    examples = synthetic("examples", torch.Size((4, LENGTH, 12)), torch.float32)
    if wrap != "alone":
        number, count = (world.rank // 2, world.size // 2) if wrap == "tp" else (world.rank, world.size)
        examples = examples.chunk(count)[number]
    model(examples).square().mean().backward()
    clip.threshold = 0.01
    optimizer.step()
    return {name: clip.largest[name] for name in names}


def infinity_found(world: World) -> list[tuple[bool, int]]:
    """Let a GradScaler's word on one rank be that it found an infinity, in the second of three steps; say when heads
    were scaled, and how many steps the clip has seen skipped."""
    model, optimizer, clip = started(world, "fsdp")
    found = []
    for step in range(3):
        before = [local(p).clone() for p in model.parameters()]
        odd_one = step == 1 and world.rank == 1
        for name, layer in clip.layers.items():
            heads, keys = layer.attention.heads, layer.attention.keys
            q, k = queries_and_keys(name, step, 1, heads, keys, layer.width)
            clip.record(name, q * torch.inf if odd_one else 10.0**step * q, k)
        scaler: Any = optimizer
        scaler.found_inf = torch.tensor(float(odd_one))
        optimizer.step()
        del scaler.found_inf
        moved = any(not torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True))
        found.append((moved, clip.skipped_steps))
    return found


def replicas(world: World) -> dict[str, Any]:
    """Plain tensors on every rank: refused where nothing says who has copies, one maximum where clip or MuonW know."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0)
    try:
        said = str(QKClip(optimizer, net.attentions()))
    except ValueError as error:
        said = str(error)
    largest = []
    shared = MuonW(net, lr=0.0, weight_decay=0.0, replicas=dist.group.WORLD)
    for one, grid in ((optimizer, dist.group.WORLD), (shared, None)):
        clip = QKClip(one, {"even": net.attentions()["even"]}, TAU, grid=grid)
        clip.record("even", *queries_and_keys("even", 0, world.rank, 4, 4, 3))
        one.step()
        largest.append(clip.largest["even"].tolist())
    return {"said": said, "largest": largest}


# ---- All of it --------------------------------------------------------------------------------------------


def facts(world: World) -> dict[str, Any]:
    """Return all of the above from one world of 2 x 2 ranks."""
    grid = Grid.of(world)
    found: dict[str, Any] = {}
    for case in CASES:
        found[case] = on_grid(grid, case)
        grid.ledger.clear()
    found["complaints"] = complaints(grid)
    for wrap in ("fsdp", "columns", "hybrid", "tp"):
        found[wrap] = on_mesh(world, wrap)
    for wrap in ("alone", "fsdp", "tp"):
        found[f"forward {wrap}"] = mesh_forward(world, wrap)
    return found | {"infinity": infinity_found(world), "replicas": replicas(world)}
