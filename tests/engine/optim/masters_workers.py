"""What every rank finds out about float32 masters of bf16 DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mesh_cases import WRAPS, Net, Wrap, give, groups_of, plain, start
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from distmuon import checkpoint
from distmuon.launch import World
from distmuon.optim.muonw import MuonW
from distmuon.sharding.local_views import local
from muon_conformance.placements import held

STEPS = 3


def build(world: World, wrap: Wrap) -> tuple[nn.Module, MuonW]:
    net = Net().to(torch.bfloat16)
    start(net)
    model = wrap(world, net)
    return model, MuonW(groups_of(model), lr=1e-3, batched=False, master_weights=True)


def train(model: nn.Module, optimizer: MuonW, steps: range) -> None:
    for step in steps:
        give(model, step)
        optimizer.step()


def masters(model: nn.Module, optimizer: MuonW) -> dict[str, Tensor]:
    return {name: optimizer.state[p]["master_weight"] for name, p in model.named_parameters()}


def differ(found: dict[str, Any], whole: dict[str, Tensor]) -> list[str]:
    return [name for name, t in found.items() if not torch.equal(local(t).detach(), held(whole[name].detach(), t))]


def facts(world: World, wrap: str, folder: str) -> dict[str, list[str]]:
    """Train the wrapped model and a plain one on the same gradients, stop and resume; return where they differ."""
    model, optimizer = build(world, WRAPS[wrap])
    alone, reference = build(world, plain)
    train(model, optimizer, range(STEPS))
    train(alone, reference, range(STEPS))
    found = {
        "weights differ": differ(dict(model.named_parameters()), dict(alone.named_parameters())),
        "masters differ": differ(masters(model, optimizer), masters(alone, reference)),
    }
    checkpoint.save(Path(folder, "at"), model, optimizer)
    by_folder, by_torch = build(world, WRAPS[wrap]), build(world, WRAPS[wrap])
    checkpoint.load(Path(folder, "at"), *by_folder)
    saved = get_optimizer_state_dict(model, optimizer)
    by_torch[0].load_state_dict(model.state_dict())
    set_optimizer_state_dict(*by_torch, optim_state_dict=saved)
    train(alone, reference, range(STEPS, 2 * STEPS))
    found["after a resumption differ"] = []
    for name, pair in (("folder", by_folder), ("torch", by_torch)):
        train(*pair, range(STEPS, 2 * STEPS))
        wrong = differ(masters(*pair), masters(alone, reference))
        found["after a resumption differ"] += [f"{name}: {each}" for each in wrong]
    return found
