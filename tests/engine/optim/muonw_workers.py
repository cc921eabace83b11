"""What every rank finds out about MuonW on the DTensors of FSDP2, of TP and of both."""

from __future__ import annotations

import copy
import math
import pickle
import traceback
from typing import Any

import part_workers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from late_wire import late_wire
from mesh_cases import WRAPS, Net, Wrap, fsdp, give, groups_of, plain, start
from optimizer_cases import synthetic
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon.launch import World
from distmuon.optim.muonw import MuonW
from distmuon.optim.states import ROW_MOMENTS
from distmuon.sharding.collectives import PendingWork
from distmuon.sharding.consistency import RankMismatchError
from distmuon.sharding.local_views import local
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.memory_tracker import StorageTracker
from muon_conformance.placements import Pair, held

STEPS = 3
TAKEN: dict[str, Wrap] = {**WRAPS, "replicas": plain}  # in every way in which ranks share the work


def mesh_facts(world: World, wrap: str) -> dict[str, Any]:
    """Return what a rank finds out about a model on a mesh."""
    found = {
        "ends": ends(world, wrap, torch.float32),
        "waves": in_waves(world, wrap),
        "waits": waits(world, wrap),
        "clipped": clipped(world, wrap, 0.5),
    }
    if wrap == "tp":
        found |= {
            "float64": ends(world, wrap, torch.float64)["differ"],
            "bfloat16": ends(world, wrap, torch.bfloat16)["far"],
            "uneven": [name for tp in (2, 3) for name in uneven_tp(world, tp)],
        }
    return found


def rank_facts(world: World) -> dict[str, Any]:
    """Return what a rank of three finds out about the rest."""
    return {
        "memory of waves": memory_of_waves(world),
        "disagree": disagree(world),
        "under DDP": under_ddp(world),
        "own gradients": on_own_gradients(world),
        "replicas on a mesh": replicas_on_a_mesh(world),
        "refused on one": refused_on_one(world),
        "infinity": scaled_infinity(world),
        "parts": part_workers.facts(world),
    }


def train(
    world: World, wrap: Wrap, dtype: torch.dtype = torch.float32, kind: type[MuonW] = MuonW, **options: Any
) -> tuple[nn.Module, MuonW, list[int]]:
    """Return the model that has been trained, its optimizer, and how many collectives each step made."""
    net = Net().to(dtype)
    start(net)
    model = wrap(world, net)
    optimizer = kind(groups_of(model), batched=False, **options)
    calls = []
    for step in range(STEPS):
        give(model, step, absent=("odd.weight",) if step == 1 else ())
        with CollectiveCounter() as counter:
            optimizer.step()
        calls.append(counter.ledger.total().calls)
    return model, optimizer, calls


def replicas_of(wrap: str) -> dict[str, Any]:
    return {"replicas": dist.group.WORLD} if wrap == "replicas" else {}


def ends(world: World, wrap: str, dtype: torch.dtype) -> dict[str, Any]:
    """Train the wrapped model and a plain one on the same gradients; return where they differ, and how many calls."""
    model, optimizer, calls = train(world, TAKEN[wrap], dtype, **replicas_of(wrap))
    reference, alone, _ = train(world, plain, dtype)
    whole = dict(reference.named_parameters())
    pairs = {n: (local(p).detach(), held(whole[n].detach(), p)) for n, p in model.named_parameters()}
    differ = [n for n, pair in pairs.items() if not torch.equal(*pair)]
    far = [n for n, pair in pairs.items() if not torch.allclose(*pair, rtol=2**-6, atol=2**-6)]
    rows = {n: [each.state[p].get(ROW_MOMENTS) for each, p in ((optimizer, p), (alone, whole[n]))]
            for n, p in model.named_parameters()}  # fmt: skip
    normed = {n: torch.equal(*pair) for n, pair in rows.items() if pair[0] is not None or pair[1] is not None}
    (plan,) = optimizer._plans.of(optimizer.param_groups, optimizer.state)
    mine, every = ([(plan.parameters[i].name, n) for i, n in keys] for keys in (plan.parcels.mine, plan.parcels.owner))
    return {"differ": differ, "far": far, "calls": calls, "rows": normed,
            "told": optimizer.ledger.total().calls, "mine": mine, "all": every}  # fmt: skip


class ReadsEarly(MuonW):
    """Reads what it has not waited for, but for the first momentum."""

    def _exchange(self, *arguments: Any, **options: Any) -> Any:
        early = super()._exchange(*arguments, **options)
        return early if len(early.received.heads[0]) else early._replace(pending=PendingWork())


def in_waves(world: World, wrap: str) -> dict[str, Any]:
    """Train all at once and in waves, on a wire that is late; return where they differ, and how many calls."""

    def trained(kind: type[MuonW], bucket_size: int) -> tuple[nn.Module, MuonW, list[int]]:
        with late_wire():
            return train(world, TAKEN[wrap], kind=kind, bucket_size=bucket_size, **replicas_of(wrap))

    def differing(model: nn.Module) -> list[str]:
        pairs = zip(model.named_parameters(), whole.parameters(), strict=True)
        return [name for (name, p), q in pairs if not torch.equal(local(p), local(q))]

    whole, _, _ = trained(MuonW, 2**20)
    model, optimizer, calls = trained(MuonW, 1)
    waves = optimizer._plans.of(optimizer.param_groups, optimizer.state)
    early, _, _ = trained(ReadsEarly, 1)
    return {"differ": differing(model), "waves": len(waves), "calls": calls[-1], "early": differing(early)}


def memory_of_waves(world: World) -> tuple[int, int]:
    """Return the peak bytes of a step that takes 24 matrices at once, and in eight waves."""
    peaks = []
    for bucket_size in (2**20, 64 * 64):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(24)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
        optimizer = MuonW(list(model.parameters()), bucket_size=bucket_size)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            with StorageTracker() as tracker:
                optimizer.step()
        peaks.append(tracker.peak)
    return peaks[0], peaks[1]


def clipped(world: World, wrap: str, bound: float) -> dict[str, Any]:
    """Clip the same gradients on the mesh and by torch's function on a plain model; return norms, and the distance."""
    model, whole = TAKEN[wrap](world, Net()), Net()
    optimizer = MuonW(groups_of(model), **replicas_of(wrap))
    for net in (model, whole):
        give(net, 0, absent=("odd.weight",))
    norm = optimizer.clip_grad_norm_(bound).item()
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), bound).item()
    grads = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    apart = [held(grads[n], p) - local(p.grad) for n, p in model.named_parameters() if p.grad is not None]
    return {"norm": norm, "wanted": wanted, "apart": max(d.abs().max().item() for d in apart if d.numel())}


class HostWaits(TorchDispatchMode):
    """Counts where Python looks at numbers of a tensor, which on a GPU waits for all that it has been given to do.

    Newton–Schulz's own looks are left out: it looks on a CPU alone.
    """

    LOOKS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func._schema.name in self.LOOKS:
            ours = next(f for f in reversed(traceback.extract_stack()) if "distmuon" in f.filename)
            if not ours.filename.endswith("newton_schulz.py"):
                self.found.append(ours.name)
        return func(*args, **(kwargs or {}))


def waits(world: World, wrap: str) -> list[str]:
    """Return who of us looks at numbers in a second step in which only Muon's matrices move, and in clipping."""
    model = TAKEN[wrap](world, Net())
    optimizer = MuonW([g for g in groups_of(model) if g["algorithm"] == "muon"], **replicas_of(wrap))
    for step in range(2):
        give(model, step)
        with HostWaits() as counter:
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
    return counter.found


def disagree(world: World) -> str:
    """Let one rank have a gradient less; return what every rank says."""
    model = fsdp(world, Net())
    optimizer = MuonW(groups_of(model))
    give(model, 0, absent=("odd.weight",) if world.rank == 1 else ())
    try:
        optimizer.step()
    except RankMismatchError as error:
        return str(error)
    return "nothing"


def under_ddp(world: World) -> dict[str, Any]:
    """Train a model that DDP has wrapped, each rank on data of its own; return how it goes and what was sent."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 3))
    copied = copy.deepcopy(net)
    model = DistributedDataParallel(net)
    shared, alone = MuonW(model, batched=False), MuonW(copied, batched=False)  # which keeps the order of sums
    for step in range(STEPS):
        model(synthetic(f"of {world.rank}, {step}", (8, 16), torch.float32)).square().mean().backward()
        for mine, other in zip(net.parameters(), copied.parameters(), strict=True):
            other.grad = None if mine.grad is None else mine.grad.clone()
        for optimizer in (shared, alone):
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            unpickled = pickle.loads(pickle.dumps(shared))
    owners = [plan.parcels.mine for plan in shared._plans.of(shared.param_groups, shared.state)]
    differ = [name for (name, p), q in zip(net.named_parameters(), copied.parameters(), strict=True) if not p.equal(q)]
    return {"differ": differ, "owns": sum(map(len, owners)), "sent": shared.ledger.total().sent_bytes,
            "alone sent": alone.ledger.total().sent_bytes, "copies send": unpickled.ledger.total().calls}  # fmt: skip


def on_own_gradients(world: World) -> list[str]:
    """Let replicas step with gradients that nobody has averaged; return what is said, and what has moved."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = copy.deepcopy(net.state_dict())
    optimizer = MuonW(net, replicas=dist.group.WORLD)
    net(synthetic(f"of {world.rank}", (8, 8), torch.float32)).square().mean().backward()
    try:
        optimizer.step()
    except RankMismatchError as error:
        return [str(error), *(name for name, value in net.state_dict().items() if not value.equal(before[name]))]
    return ["nothing"]


def replicas_on_a_mesh(world: World) -> str:
    """Name replicas of DTensors; return what is said."""
    model = fsdp(world, Net())
    optimizer = MuonW(groups_of(model), replicas=dist.group.WORLD)
    give(model, 0)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "nothing"


def uneven_tp(world: World, tp: int) -> list[str]:
    """Cut widths that the TP ranks do not divide, and shard the parts; return what differs from one process."""
    mesh = init_device_mesh("cpu", (world.size // tp, tp), mesh_dim_names=("dp", "tp"))
    differ = []
    for width, hidden in ((8, 7), (6, 5), (5, 3), (4, 1)):
        model, whole = Pair(width, hidden), Pair(width, hidden)
        for net in (model, whole):
            start(net)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        for net in (model, whole):
            optimizer = MuonW(net.named_parameters(), batched=False)
            for step in range(2):
                give(net, step)
                optimizer.step()
        there = dict(whole.named_parameters())
        for name, p in model.named_parameters():
            part = held(there[name].detach(), p)
            if part.numel() and not torch.equal(local(p), part):
                differ.append(f"{name} of {width} x {hidden}")
    return differ


def train_on(model: nn.Module, optimizer: MuonW, steps: range) -> None:
    """Take steps whose learning rates fall, in every group."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
        give(model, step)
        optimizer.step()
        optimizer.zero_grad()


def saved_by_torch(world: World, folder: str, steps: int) -> None:
    """Train on FSDP2, and save it as torch's own trainers do."""
    net = Net()
    start(net)
    model = fsdp(world, net)
    optimizer = MuonW(groups_of(model), batched=False)
    train_on(model, optimizer, range(steps))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def resumed_by_torch(world: World, folder: str, first: int, last: int) -> list[str]:
    """Go on from there on these ranks; return the parameters that differ from an uninterrupted run of one process."""
    model = fsdp(world, Net())
    optimizer = MuonW(groups_of(model), batched=False)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    train_on(model, optimizer, range(first, last))
    whole = Net()
    start(whole)
    train_on(whole, MuonW(groups_of(whole), batched=False), range(last))
    there = dict(whole.named_parameters())
    return [n for n, p in model.named_parameters() if not torch.equal(local(p), held(there[n].detach(), p))]


def refused_on_one(world: World) -> list[str]:
    """Let one rank have a learning rate that is NaN, then all; return what this rank says, and whether it moved."""
    model = fsdp(world, Net())
    optimizer = MuonW(groups_of(model))
    before = [local(p).detach().clone() for p in model.parameters()]
    said: list[str] = []
    for concerned in (world.rank == 1, True):
        optimizer.param_groups[0]["lr"] = math.nan if concerned else 0.02
        give(model, 0)
        try:
            optimizer.step()
        except ValueError as error:
            said.append(str(error))
    assert not any(optimizer.state[p] for p in model.parameters()) or world.rank != 1
    moved = any(not torch.equal(old, local(p)) for old, p in zip(before, model.parameters(), strict=True))
    return [*said, f"moved: {moved}"]


def scaled_infinity(world: World) -> dict[str, Any]:
    """Under a GradScaler, let one rank's gradient be infinite in the second of three steps; say when weights moved."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    net = nn.Linear(6, 6)
    start(net)
    model: Any = fully_shard(net, mesh=mesh)
    optimizer, scaler = MuonW(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    moved = []
    for step in range(3):
        before = [local(p).clone() for p in model.parameters()]
        scaler.scale(model(synthetic(f"{step}", (5, 6), torch.float32)).square().mean()).backward()
        if step == 1 and world.rank == 1:
            local(model.weight.grad).fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(not all(torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True)))
    return {"moved": moved, "scale": scaler.get_scale()}
