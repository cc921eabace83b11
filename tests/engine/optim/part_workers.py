"""What a rank of two finds out about models of which it has a part: frozen layers, pipeline stages, FSDP1."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muonw import MuonW
from distmuon.optim.param_groups import split_parameters
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.local_views import local


def facts(world: World) -> dict[str, Any]:
    return {"unfrozen": unfrozen(world), "stages": stages(world), "FSDP1": flat(world), "offloaded": offloaded(world)}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))


def unfrozen(world: World) -> dict[str, Any]:
    """Unfreeze a layer of a sharded model after two steps; return what each step sent, and when the layer moved."""
    net = model()
    net[0].requires_grad_(False)
    fully_shard(net, mesh=init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",)))
    optimizer, sent, moved = MuonW(net), [], []
    for step in range(4):
        net[0].requires_grad_(step >= 2)
        before = local(net[0].get_parameter("weight")).detach().clone()
        net(torch.ones(2, 8)).square().sum().backward()
        optimizer.ledger.clear()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(optimizer.ledger.total().sent_bytes)
        moved.append(not torch.equal(local(net[0].get_parameter("weight")), before))
    return {"sent": sent, "moved": moved}


def stages(world: World) -> dict[str, str]:
    """Take a mesh of two pipeline stages; return what is said of each optimizer and wish."""
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("pp", "dp"))["dp"]
    net = model()
    fully_shard(net, mesh=mesh)
    muonw, sharded, plain = MuonW(net), DistributedMuon(split_parameters(other := model()), mesh), model()
    for each in (net, other):
        each(torch.ones(2, 8)).square().sum().backward()
    scaled = DistributedMuon(split_parameters(again := model()), mesh)
    scale: dict[str, Any] = {"grad_scale": torch.ones(()), "found_inf": torch.zeros(())}  # what a GradScaler hands over
    for optimizer in (muonw, scaled):
        vars(optimizer).update(scale)
    again(torch.ones(2, 8)).square().sum().backward()
    before = local(net[0].get_parameter("weight")).detach().clone()
    found = {
        "DistributedMuon": said(lambda: DistributedMuon(split_parameters(plain), mesh)),
        "Zero1AdamW, max_norm": said(lambda: Zero1AdamW(plain.parameters(), mesh, max_norm=1.0)),
        "DistributedMuon, skip": said(lambda: DistributedMuon(split_parameters(plain), mesh, on_nonfinite="skip")),
        "DistributedMuon, clip": said(lambda: sharded.clip_grad_norm_(1.0)),
        "DistributedMuon, scaler": said(scaled.step),
        "DistributedMuon, step": said(sharded.step),
        "MuonW, clip": said(lambda: muonw.clip_grad_norm_(1.0)),
        "MuonW, measure": said(lambda: muonw.clip_grad_norm_(math.inf)),
        "MuonW, scaler": said(muonw.step),
    }
    for name in scale:
        delattr(muonw, name)
    same = torch.equal(local(net[0].get_parameter("weight")), before)
    return found | {"unchanged until here": str(same), "MuonW, step": said(muonw.step)}


def offloaded(world: World) -> str:
    """Make a MuonW of parameters on the CPU, on a mesh whose group is said to carry GPU tensors alone."""
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_backend_config", lambda _: "cuda:nccl")
        return said(lambda: MuonW(net))


def flat(world: World) -> list[str]:
    """Wrap a model by FSDP1 in both of its ways; return what is said."""
    device = torch.device("cpu")
    ways = [FullyShardedDataParallel(model(), use_orig_params=way, device_id=device) for way in (False, True)]
    return [said(partial(MuonW, net)) for net in ways]


def said(act: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            act()
        except ValueError as error:
            return f"refused: {error}"
    return " ".join(str(warning.message) for warning in seen)
