"""MuonW, and others of a part of a model, on every rank of three: what they agree on, share, and cannot take."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import check
from mesh_cases import Net, fsdp, give, groups_of, start
from optimizer_cases import synthetic
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muonw import MuonW
from distmuon.optim.param_groups import split_parameters
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.consistency import RankMismatchError
from distmuon.sharding.local_views import local
from distmuon.verify.memory_tracker import StorageTracker

STEPS = 3


def layers(number: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(number)))


def sharded(world: World, net: Any, mesh: Any = None) -> Any:
    return fully_shard(net, mesh=mesh or init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",)))


def parts_of(net: nn.Module) -> list[torch.Tensor]:
    return [local(p).detach().clone() for p in net.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- Agreement --------------------------------------------------------------------------------------------


@check
def ranks_that_disagree_all_say_so(world: World) -> None:
    model = fsdp(world, Net())
    optimizer = MuonW(groups_of(model))
    give(model, 0, absent=("odd.weight",) if world.rank == 1 else ())
    with pytest.raises(RankMismatchError, match=r"1 step with other options, or with gradients for other parameters,"):
        optimizer.step()


@check
def what_one_rank_refuses_stops_all_before_a_weight_moves(world: World) -> None:
    model = fsdp(world, Net())
    optimizer, before = MuonW(groups_of(model)), parts_of(model)
    optimizer.param_groups[0]["lr"] = math.nan if world.rank == 1 else 0.02
    give(model, 0)
    wanted = "lr=nan, weight_decay=0.1, momentum=0.95: " if world.rank == 1 else r"rank\(s\) 1 step with other options"
    with pytest.raises(ValueError, match=wanted):
        optimizer.step()
    assert same(parts_of(model), before)


@check
def an_infinity_on_one_rank_is_skipped_by_all(world: World) -> None:
    net = nn.Linear(6, 6)
    start(net)
    model = sharded(world, net)
    optimizer, scaler = MuonW(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        before = parts_of(model)
        scaler.scale(model(synthetic(f"{step}", (5, 6), torch.float32)).square().mean()).backward()
        if step == 1 and world.rank == 1:
            local(model.weight.grad).fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert same(parts_of(model), before) == (step == 1)
    assert scaler.get_scale() == 4.0


@check
def waves_take_a_part_of_the_memory(world: World) -> None:
    """24 matrices at once, and in eight waves."""
    peaks = []
    for bucket_size in (2**20, 64 * 64):
        model = sharded(world, nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(24))))
        optimizer = MuonW(list(model.parameters()), bucket_size=bucket_size)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            with StorageTracker() as tracker:
                optimizer.step()
        peaks.append(tracker.peak)
    assert peaks[1] < 0.5 * peaks[0]


# ---- Replicas ---------------------------------------------------------------------------------------------


@check
def replicas_of_ddp_share_newton_schulz_and_end_where_each_ends_alone(world: World) -> None:
    """What travels is one update of each matrix, in bf16, from its owner to the two others. Headers come before it."""
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
    assert same(parts_of(net), parts_of(copied))
    assert alone.ledger.total().calls == unpickled.ledger.total().calls == 0
    owns = sum(len(plan.parcels.mine) for plan in shared._plans.of(shared.param_groups, shared.state))
    by_rank = [0] * world.size
    dist.all_gather_object(by_rank, owns)
    assert sorted(by_rank) == [1, 1, 2]
    headers = 2 * 4 * 2  # others, elements, bytes
    assert shared.ledger.total().sent_bytes == STEPS * (headers + 2 * owns * 16 * 16 * 2)


@check
def replicas_whose_gradients_nobody_has_averaged_say_so_and_stay_as_they_are(world: World) -> None:
    net = layers(2)
    optimizer, before = MuonW(net, replicas=dist.group.WORLD), parts_of(net)
    net(synthetic(f"of {world.rank}", (8, 8), torch.float32)).square().mean().backward()
    with pytest.raises(
        RankMismatchError, match=r"replica\(s\) 1, 2 step with other gradients .* average gradients before"
    ):
        optimizer.step()
    assert same(parts_of(net), before)


@check
def replicas_of_dtensors_are_their_meshs_to_name(world: World) -> None:
    model = fsdp(world, Net())
    optimizer = MuonW(groups_of(model), replicas=dist.group.WORLD)
    give(model, 0)
    with pytest.raises(ValueError, match="replicas is given, and there are DTensors, whose mesh says already who"):
        optimizer.step()


# ---- A part of a model ------------------------------------------------------------------------------------


@check
def a_frozen_layer_costs_no_traffic_and_trains_once_it_is_unfrozen(world: World) -> None:
    net = layers()
    net[0].requires_grad_(False)
    optimizer, sent = MuonW(sharded(world, net)), []
    for step in range(4):
        net[0].requires_grad_(step >= 2)
        before = parts_of(net[0])
        net(torch.ones(2, 8)).square().sum().backward()
        optimizer.ledger.clear()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(optimizer.ledger.total().sent_bytes)
        assert same(parts_of(net[0]), before) == (step < 2)
    few, still_few, more, as_many = sent
    assert 0 < few == still_few < more == as_many


def warned(act: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        act()
    return " ".join(str(warning.message) for warning in seen)


@check
def a_pipelines_stages_do_not_decide_each_for_itself_without_a_word(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("pp", "dp"))["dp"]
    plain, net, other, again = layers(), sharded(world, layers(), mesh), layers(), layers()
    said = warned(lambda: DistributedMuon(split_parameters(plain), mesh))
    assert "dimension(s) pp" in said, said
    muonw, clipped, scaled = MuonW(net), *(DistributedMuon(split_parameters(model), mesh) for model in (other, again))
    for each in (net, other, again):
        each(torch.ones(2, 8)).square().sum().backward()
    scale: dict[str, Any] = {"grad_scale": torch.ones(()), "found_inf": torch.zeros(())}  # what a GradScaler hands over
    for optimizer in (muonw, scaled):
        vars(optimizer).update(scale)
    before = parts_of(net)
    wishes: list[tuple[str, Callable[[], Any]]] = [  # words of the remedy
        ("", lambda: Zero1AdamW(plain.parameters(), mesh, max_norm=1.0)),
        ("with_stages", lambda: DistributedMuon(split_parameters(plain), mesh, on_nonfinite="skip")),
        ("", lambda: clipped.clip_grad_norm_(1.0)),
        ("stages=mesh.get_group", lambda: muonw.clip_grad_norm_(1.0)),
        ("in bf16", scaled.step),
        ("in bf16", muonw.step),
    ]
    for remedy, wish in wishes:
        with pytest.raises(ValueError, match="one pipeline stage alone") as error:
            wish()
        assert "'pp'" in str(error.value)
        assert remedy in str(error.value)
    assert same(parts_of(net), before)
    for name in scale:
        delattr(muonw, name)
    assert not warned(clipped.step) + warned(lambda: muonw.clip_grad_norm_(math.inf)) + warned(muonw.step)


@check
def parameters_where_their_ranks_cannot_exchange_them_are_refused_at_construction(world: World) -> None:
    """They are on the CPU, and their mesh's group is said to carry GPU tensors alone."""
    net = sharded(world, layers())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_backend_config", lambda _: "cuda:nccl")
        with pytest.raises(ValueError, match=r"parameter '0\.weight' is on the cpu.*CPUOffloadPolicy"):
            MuonW(net)


@check
def flat_parameters_are_refused_in_both_of_fsdp1s_ways(world: World) -> None:
    for way in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = FullyShardedDataParallel(layers(), use_orig_params=way, device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match=r"\(FSDP1\).*fully_shard"):
            MuonW(net)
