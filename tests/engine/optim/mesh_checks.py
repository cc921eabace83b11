"""MuonW on every rank of a mesh, on DTensors of FSDP2 and TP and on replicas: it is what one process does."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checks import check
from late_wire import late_wire
from mesh_cases import WRAPS, Net, Wrap, fsdp, give, groups_of, plain, start
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from distmuon import checkpoint
from distmuon.launch import World
from distmuon.optim.muonw import MuonW
from distmuon.optim.newton_schulz import flops
from distmuon.optim.states import ROW_MOMENTS
from distmuon.sharding.collectives import PendingWork
from distmuon.sharding.local_views import local
from distmuon.verify.counter import CollectiveCounter
from muon_conformance.placements import Pair, held

STEPS = 3
TAKEN: dict[str, Wrap] = {**WRAPS, "replicas": plain}  # in every way in which ranks share the work


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


def differ(found: Any, whole: Any) -> list[str]:
    """Return the names of tensors of which this rank does not hold what it should of the whole ones, to the bit."""
    pairs = {name: (local(t).detach(), held(whole[name].detach(), t)) for name, t in found.items()}
    return [name for name, (mine, theirs) in pairs.items() if mine.numel() and not torch.equal(mine, theirs)]


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


@check
def every_rank_ends_to_the_bit_where_one_process_does_in_three_collectives(world: World, wrap: str) -> None:
    """The third is NorMuon's."""
    model, optimizer, calls = train(world, TAKEN[wrap], **replicas_of(wrap))
    reference, alone, _ = train(world, plain)
    mine, whole = named(model), named(reference)
    assert differ(mine, whole) == []
    assert calls == [3] * STEPS
    assert optimizer.ledger.total().calls == 3 * STEPS
    for name, p in mine.items():
        rows, theirs = (each.state[q].get(ROW_MOMENTS) for each, q in ((optimizer, p), (alone, whole[name])))
        assert (rows is None) == (theirs is None) == (name not in ("experts", "kernel", "fused")), name
        assert rows is None or torch.equal(rows, theirs), name
    (plan,) = optimizer._plans.of(optimizer.param_groups, optimizer.state)
    owned: list[list[Any]] = [[]] * world.size
    dist.all_gather_object(owned, [*plan.parcels.mine])
    assert sorted(key for rank in owned for key in rank) == sorted(plan.parcels.owner)  # every matrix has one owner


@check
def so_it_does_in_float64_and_in_bfloat16_it_ends_nearby(world: World, wrap: str) -> None:
    """torch rounds a + alpha b in bfloat16 once in a vector and twice in what is left over, so place tells."""
    if wrap != "tp":
        return  # the hardest
    (wide, *_), (reference, *_) = (train(world, way, torch.float64) for way in (TAKEN[wrap], plain))
    assert differ(named(wide), named(reference)) == []
    (narrow, *_), (reference, *_) = (train(world, way, torch.bfloat16) for way in (TAKEN[wrap], plain))
    for name, p in named(narrow).items():
        torch.testing.assert_close(local(p), held(named(reference)[name], p), rtol=2**-6, atol=2**-6)


class ReadsEarly(MuonW):
    """Reads what it has not waited for, but for the first momentum."""

    def _exchange(self, *arguments: Any, **options: Any) -> Any:
        early = super()._exchange(*arguments, **options)
        return early if len(early.received.heads[0]) else early._replace(pending=PendingWork())


@check
def matrices_that_are_taken_in_waves_end_where_all_at_once_do(world: World, wrap: str) -> None:
    """On a wire that is late; and one that does not wait is found."""

    def trained(kind: type[MuonW], bucket_size: int) -> tuple[list[Tensor], MuonW, list[int]]:
        with late_wire():
            model, optimizer, calls = train(world, TAKEN[wrap], kind=kind, bucket_size=bucket_size, **replicas_of(wrap))
        return [local(p).detach() for p in model.parameters()], optimizer, calls

    (whole, *_), (found, optimizer, calls), (early, *_) = (
        trained(MuonW, 2**20), trained(MuonW, 1), trained(ReadsEarly, 1)
    )  # fmt: skip
    assert all(map(torch.equal, found, whole))
    plans = optimizer._plans.of(optimizer.param_groups, optimizer.state)
    assert 2 < len(plans) == (calls[-1] - 1) / 2
    assert not all(map(torch.equal, early, whole))
    if wrap == "replicas":  # where every rank may own every matrix, no wave begins anew with rank 0
        parcels = [plan.parcels for plan in plans]
        work = [(owner, flops(each.whole(matrix)[1])) for each in parcels for matrix, owner in each.owner.items()]
        done = [sum(cost for owner, cost in work if owner == rank) for rank in range(world.size)]
        assert max(done) - min(done) <= max(cost for _, cost in work)


@check
def gradients_are_clipped_as_one_process_clips_them(world: World, wrap: str) -> None:
    model, whole = TAKEN[wrap](world, Net()), Net()
    optimizer = MuonW(groups_of(model), **replicas_of(wrap))
    for net in (model, whole):
        give(net, 0, absent=("odd.weight",))
    norm = optimizer.clip_grad_norm_(0.5).item()
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item(), rel=1e-6)
    by_rank = [0.0] * world.size
    dist.all_gather_object(by_rank, norm)
    assert set(by_rank) == {norm}
    for name, p in named(model).items():
        if p.grad is not None:
            theirs = named(whole)[name].grad
            assert theirs is not None
            torch.testing.assert_close(local(p.grad), held(theirs, p), rtol=0, atol=1e-6)


class HostWaits(TorchDispatchMode):
    """Counts where Python looks at numbers of a tensor, which on a GPU waits for all that it has been given to do.

    Newton–Schulz's own looks are left out: it looks on a CPU alone.
    """

    LOOKS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> Any:
        self._tolist = torch.Tensor.tolist  # of which a dispatcher of the CPU's hears nothing
        looks = self._looks

        def tolist(tensor: Tensor) -> Any:
            looks()
            return self._tolist(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*raised)

    def _looks(self) -> None:
        ours = next(f for f in reversed(traceback.extract_stack()) if "/distmuon/" in f.filename)
        if not ours.filename.endswith("newton_schulz.py"):
            self.found.append(ours.name)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func._schema.name in self.LOOKS:
            self._looks()
        return func(*args, **(kwargs or {}))


@check
def a_step_waits_for_the_device_once_however_many_ranks_there_are(world: World, wrap: str) -> None:
    """The second one, in which only Muon's matrices move, and clipping before it."""
    model = TAKEN[wrap](world, Net())
    optimizer = MuonW([g for g in groups_of(model) if g["algorithm"] == "muon"], **replicas_of(wrap))
    for step in range(2):
        give(model, step)
        with HostWaits() as counter:
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
            optimizer.step()
    assert counter.found == ["clip_grad_norm_", "_refuse_different"]


@check
def parts_that_tp_cuts_unequally_are_trained_as_in_one_process(world: World, wrap: str) -> None:
    """DTensor's metadata is wrong about them; the boxes are not."""
    for tp in (2, 3) if wrap == "tp" else ():
        mesh = init_device_mesh("cpu", (world.size // tp, tp), mesh_dim_names=("dp", "tp"))
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
            assert differ(named(model), named(whole)) == [], (tp, width, hidden)


# ---- Masters of bf16 parameters, saved and loaded -----------------------------------------------------------


def with_masters(world: World, wrap: Wrap) -> tuple[nn.Module, MuonW]:
    net = Net().to(torch.bfloat16)
    start(net)
    model = wrap(world, net)
    return model, MuonW(groups_of(model), lr=1e-3, batched=False, master_weights=True)


def go_on(model: nn.Module, optimizer: MuonW, steps: range) -> None:
    for step in steps:
        give(model, step)
        optimizer.step()


def masters(model: nn.Module, optimizer: MuonW) -> dict[str, Tensor]:
    return {name: optimizer.state[p]["master_weight"] for name, p in named(model).items()}


@check
def a_narrow_model_with_masters_ends_to_the_bit_where_one_process_does(world: World, wrap: str) -> None:
    """And goes on from a checkpoint of ours, and from a state of torch's."""
    if wrap != "tp":
        return
    model, optimizer = pair = with_masters(world, TAKEN[wrap])
    alone, reference = with_masters(world, plain)
    for net, its in (pair, (alone, reference)):
        go_on(net, its, range(STEPS))
    assert differ(named(model), named(alone)) == []
    assert differ(masters(model, optimizer), masters(alone, reference)) == []
    folder = [tempfile.mkdtemp(prefix="masters-") if world.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    checkpoint.save(Path(folder[0], "at"), model, optimizer)
    by_folder, by_torch = with_masters(world, TAKEN[wrap]), with_masters(world, TAKEN[wrap])
    checkpoint.load(Path(folder[0], "at"), *by_folder)
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(folder[0])
    state = get_optimizer_state_dict(model, optimizer)
    by_torch[0].load_state_dict(model.state_dict())
    set_optimizer_state_dict(*by_torch, optim_state_dict=state)
    go_on(alone, reference, range(STEPS, 2 * STEPS))
    for resumed in (by_folder, by_torch):
        go_on(*resumed, range(STEPS, 2 * STEPS))
        assert differ(masters(*resumed), masters(alone, reference)) == []


# ---- Workers of their own -----------------------------------------------------------------------------------


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
    return differ(named(model), named(whole))
