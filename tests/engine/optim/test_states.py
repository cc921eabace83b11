"""States that almost fit: of another optimizer, in another order, of another shape. Converted, or refused untouched."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers_math import message
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.optim.muonw import MuonW
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from muon_conformance.programs import SmallNet, set_lr, train

Make = Callable[[nn.Module], Optimizer]


def as_adamw(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": model.named_parameters(), "algorithm": "adamw"}]


OURS: dict[str, Make] = {
    "Muon": lambda m: Muon(m.named_parameters(), lr=0.02),
    "MuonW": lambda m: MuonW(m.named_parameters(), lr=0.02),
    "MuonW, AdamW alone": lambda m: MuonW(as_adamw(m), lr=0.02),
    "DistributedMuon": lambda m: DistributedMuon(m.named_parameters(), Grid.alone(), lr=0.02),
    "DistributedMuon, owner": lambda m: DistributedMuon(m.named_parameters(), Grid.alone(), lr=0.02, strategy="owner"),
    "DistributedMuon, AdamW alone": lambda m: DistributedMuon(as_adamw(m), Grid.alone(), lr=0.02),
    "Zero1AdamW": lambda m: Zero1AdamW(m.named_parameters(), Grid.alone(), lr=0.02),
}
OTHERS: dict[str, Make] = {
    "torch.optim.AdamW": lambda m: torch.optim.AdamW(m.named_parameters(), lr=0.02),
    "torch.optim.Muon": lambda m: torch.optim.Muon(m.named_parameters(), lr=0.02),
    "torch.optim.SGD": lambda m: torch.optim.SGD(m.named_parameters(), lr=0.02, momentum=0.9),
}
ALL = OURS | OTHERS
SHARDED_ADAMW = {"Zero1AdamW", "DistributedMuon, AdamW alone"}  # the same arithmetic on the same shards
SHARDED_MUON = {"DistributedMuon", "DistributedMuon, owner"}  # which have the same map where there is one rank
PAIRS = [*itertools.product(ALL, OURS)]


def convertible(saves: str, loads: str) -> bool:
    return saves == loads or any({saves, loads} <= same for same in (SHARDED_ADAMW, SHARDED_MUON))


def trained(kind: str, steps: int = 2) -> tuple[nn.Module, Optimizer]:
    model = SmallNet()
    optimizer = ALL[kind](model)
    train(model, optimizer, steps)
    return model, optimizer


def everything(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Return a copy of all that a refusal must leave as it is."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    states = [dict(optimizer.state.get(p, {})) for p in model.parameters()]
    return copy.deepcopy([[p.detach() for p in model.parameters()], groups, states, getattr(optimizer, "steps", None)])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def goes_on(source: tuple[nn.Module, Optimizer], target: tuple[nn.Module, Optimizer]) -> bool:
    """Return whether both train on alike, on a learning rate that falls."""
    target[0].load_state_dict(source[0].state_dict())
    for lr in (0.01, 0.001):
        for model, optimizer in (source, target):
            set_lr(optimizer, lr)
            train(model, optimizer, 1, first=2)
    return same(weights(source[0]), weights(target[0]))


# ---- All against all --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saves", "loads"), PAIRS)
def test_a_state_is_converted_or_refused_untouched(saves: str, loads: str) -> None:
    source, target = trained(saves), trained(loads, 1)
    before = everything(*target)
    saved = copy.deepcopy(source[1].state_dict())
    if convertible(saves, loads):
        target[1].load_state_dict(saved)
        assert goes_on(source, target)
        return
    with pytest.raises(ValueError, match=r"state|group") as error:
        target[1].load_state_dict(saved)
    message(error)
    assert same(before, everything(*target))
    train(*target, 1)


SHARDED = [name for name in OURS if name.startswith(("Distributed", "Zero1"))]
WHOLE = [name for name in OURS if "Muon" in name and "Distributed" not in name]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("saves", "loads"), PAIRS)
def test_so_is_one_that_came_by_torchs_distributed_checkpoint(saves: str, loads: str, flat: bool) -> None:
    source, target = trained(saves), trained(loads, 1)
    before = everything(*target)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = copy.deepcopy(get_optimizer_state_dict(source[0], source[1], options=options))
    if saves == loads and loads in WHOLE:
        set_optimizer_state_dict(target[0], target[1], saved, options=options)
        assert goes_on(source, target)
        return
    with pytest.raises((ValueError, KeyError)) as error:  # the latter is torch's, of an option that is not there
        set_optimizer_state_dict(target[0], target[1], saved, options=options)
    if error.type is not KeyError:
        message(error)
    assert same(before, everything(*target))


TAKES: dict[str, Callable[[nn.Module, Optimizer, Path], object]] = {
    "get_optimizer_state_dict": lambda model, optimizer, _: get_optimizer_state_dict(model, optimizer),
    "get_state_dict": lambda model, optimizer, _: get_state_dict(model, optimizer),
    "save": lambda _, optimizer, folder: dcp.save({"": optimizer}, checkpoint_id=folder, no_dist=True),
    "load": lambda _, optimizer, folder: dcp.load({"": optimizer}, checkpoint_id=folder, no_dist=True),
}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("take", TAKES)
@pytest.mark.parametrize("kind", SHARDED)
def test_torchs_distributed_checkpoint_gets_no_shard_and_changes_nothing(
    kind: str, take: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(kind, steps)
    assert isinstance(optimizer, ShardedOptimizer)
    monkeypatch.setattr(optimizer.grid.tp, "size", 2)  # which is looked at before anything is sent
    before = everything(model, optimizer)
    dcp.save({"": torch.zeros(1)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(RuntimeError, match=r"save and load with distmuon\.checkpoint") as error:
        TAKES[take](model, optimizer, tmp_path)
    message(error)
    assert same(before, everything(model, optimizer))


@pytest.mark.parametrize("kind", WHOLE)
def test_torchs_distributed_checkpoint_resumes_a_fresh_optimizer(kind: str) -> None:
    """It lets a fresh optimizer take a step of its own before it loads: nothing of that step may stay."""
    source, target = trained(kind), trained(kind, 0)
    saved = copy.deepcopy(get_optimizer_state_dict(*source))
    set_optimizer_state_dict(target[0], target[1], saved)
    assert goes_on(source, target)


# ---- Names ------------------------------------------------------------------------------------------------


class Twins(nn.Module):
    """Two matrices of one shape, given to the optimizer in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def twins(make: Callable[[Any], Optimizer], turned: bool, steps: int) -> tuple[Twins, Optimizer]:
    torch.manual_seed(0)
    model = Twins()
    named = list(model.named_parameters())
    optimizer = make(named[::-1] if turned else named)
    for i in range(steps):
        step_twins(model, optimizer, i)
    return model, optimizer


def step_twins(model: Twins, optimizer: Optimizer, i: int) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(i))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


NAMED: dict[str, Callable[[Any], Optimizer]] = {
    "Muon": lambda named: Muon(named, lr=0.02),
    "MuonW": lambda named: MuonW(named, lr=0.02),
    "MuonW, AdamW alone": lambda named: MuonW([{"params": named, "algorithm": "adamw"}], lr=0.02),
    "two groups": lambda named: MuonW([{"params": [pair], "lr": 0.01 * ord(pair[0][0])} for pair in named]),
}


@pytest.mark.parametrize("kind", NAMED)
def test_the_same_names_in_another_order_are_put_right(kind: str) -> None:
    model, optimizer = twins(NAMED[kind], False, 2)
    other, resumed = twins(NAMED[kind], True, 0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    names = [name for group in resumed.param_groups for name in group["param_names"]]
    assert names == ["b.weight", "a.weight"]
    other.load_state_dict(model.state_dict())
    for i in range(2, 4):
        step_twins(model, optimizer, i)
        step_twins(other, resumed, i)
    assert same(weights(model), weights(other))


@pytest.mark.parametrize("make", [Zero1AdamW, DistributedMuon])
def test_a_shard_of_the_same_names_in_another_order_is_refused(make: Any) -> None:
    _, optimizer = twins(lambda named: make(named, Grid.alone()), False, 1)
    other, resumed = twins(lambda named: make(named, Grid.alone()), True, 1)
    before = everything(other, resumed)
    with pytest.raises(ValueError, match=r"has 'a.weight' in the place of 'b.weight': the same parameters") as error:
        resumed.load_state_dict(optimizer.state_dict())
    message(error)
    assert same(before, everything(other, resumed))


def test_wrappers_names_are_the_models() -> None:
    prefix = "module._orig_mod."
    model, optimizer = twins(NAMED["MuonW"], False, 2)
    other, resumed = twins(lambda named: NAMED["MuonW"]([(prefix + n, p) for n, p in named]), True, 0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    momenta = [o.state[p.weight]["momentum_buffer"] for o, m in ((optimizer, model), (resumed, other)) for p in (m.a,)]
    assert torch.equal(*momenta)
    assert resumed.param_groups[0]["param_names"] == [f"{prefix}b.weight", f"{prefix}a.weight"]


def test_other_names_are_refused_where_some_are_the_same() -> None:
    _, optimizer = twins(NAMED["MuonW"], False, 1)
    other, resumed = twins(lambda named: NAMED["MuonW"]([named[0], ("c.weight", named[1][1])]), False, 1)
    before = everything(other, resumed)
    with pytest.raises(ValueError, match=r"parameter 'b.weight' is in the state alone"):
        resumed.load_state_dict(optimizer.state_dict())
    _, divided = twins(NAMED["two groups"], False, 1)
    with pytest.raises(ValueError, match=r"divides the same parameters into other groups"):
        divided.load_state_dict(optimizer.state_dict())
    assert same(before, everything(other, resumed))


# ---- Shapes, masters, copies ------------------------------------------------------------------------------


def spoiled(state: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    found = copy.deepcopy(state)
    change(found["state"][0])
    return found


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.update({k: v[:3] for k, v in s.items() if k != "step"}), "shape"),
        (lambda s: s.update(other=s.pop(next(k for k in s if k != "step"))), "lacks"),
        (lambda s: s.update({k: {} for k in s}), "lacks"),
    ],
)
def test_a_damaged_state_is_refused(kind: str, change: Callable[[dict[str, Any]], Any], says: str) -> None:
    model, optimizer = trained(kind)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=says) as error:
        optimizer.load_state_dict(spoiled(optimizer.state_dict(), change))
    message(error)
    assert same(before, everything(model, optimizer))


NO_STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nothing": (lambda s: None, "but a NoneType; give what its state_dict"),
    "a checkpoint with more in it": (
        lambda s: {"model": {}, "optimizer": s},
        "but a dict of 'model', 'optimizer'; give",
    ),
    "no groups": (lambda s: s | {"param_groups": None}, "but a dict of 'state', 'param_groups'"),
    "groups of nothing": (lambda s: s | {"param_groups": [{}]}, "but a dict of 'state', 'param_groups'"),
    "no tensors": (lambda s: s | {"state": {0: None}}, "but a dict of 'state', 'param_groups'"),
}


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("case", NO_STATES)
def test_what_is_no_state_is_refused_in_a_sentence(kind: str, case: str) -> None:
    model, optimizer = trained(kind)
    before, (change, says) = everything(model, optimizer), NO_STATES[case]
    with pytest.raises(ValueError, match=f"this is no state of an optimizer, {says}") as error:
        optimizer.load_state_dict(change(optimizer.state_dict()))
    message(error)
    assert same(before, everything(model, optimizer))


@pytest.mark.parametrize("kind", ["DistributedMuon", "Zero1AdamW"])
def test_a_sharded_state_counts_its_steps(kind: str) -> None:
    model, optimizer = trained(kind)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="steps in this state is None; give a whole number") as error:
        optimizer.load_state_dict(optimizer.state_dict() | {"steps": None})
    message(error)
    assert same(before, everything(model, optimizer))


def test_a_state_without_master_weights_is_refused() -> None:
    model = SmallNet().bfloat16()
    optimizer = DistributedMuon(model.named_parameters(), Grid.alone(), lr=0.02)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    assert saved["state"][0]["master_weight"].dtype == torch.float32
    with pytest.raises(ValueError, match=r"lacks the master_weight of 'first.weight'"):
        optimizer.load_state_dict(spoiled(saved, lambda state: state.pop("master_weight")))
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert "master_weight" in optimizer.state_dict()["state"][0]


@pytest.mark.parametrize("kind", OURS)
def test_a_state_may_be_gone_back_to_twice(kind: str) -> None:
    """torch's optimizers go on writing to the tensors that were loaded, so that the second time is another."""
    model, optimizer = trained(kind)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ends = []
    for _ in range(2):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, 2, first=2)
        ends.append(weights(model))
    assert same(*ends)
