"""A state of one optimizer, loaded by another: the same mathematics goes on, and everything else is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_math import message
from optimizer_cases import synthetic
from torch import Tensor, nn
from torch.optim import Optimizer

from distmuon.checkpoint import CheckpointError, load, save
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.optim.muonw import MuonW
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid

STEPS = 2  # before a checkpoint, and after it
ADAMW: dict[str, Any] = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
MUON: dict[str, Any] = dict(lr=0.02, momentum=0.9, weight_decay=0.1, batched=False)


class Small(nn.Module):
    """Two matrices and what is none, with a buffer."""

    seen: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 6, dtype=dtype), nn.Linear(6, 4, bias=False, dtype=dtype)
        self.scalar = nn.Parameter(torch.zeros((), dtype=dtype))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(synthetic(f"start {name}", p.shape, dtype))


Make = Callable[[nn.Module], list[Optimizer]]


def named(model: nn.Module, matrices: bool) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if (p.ndim == 2) == matrices]


def both(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": named(model, True), "algorithm": "muon", **MUON},
        {"params": named(model, False), "algorithm": "adamw", **ADAMW},
    ]


def all_adamw(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.named_parameters()), "algorithm": "adamw", **ADAMW}]


def beside_adamw(make: Callable[..., Optimizer]) -> Make:
    return lambda model: [make(named(model, True)), torch.optim.AdamW(named(model, False), **ADAMW)]


HYBRID = {
    "Muon": beside_adamw(lambda params: Muon(params, input_dtype=torch.bfloat16, **MUON)),
    "MuonW": lambda model: [MuonW(both(model))],
    "DistributedMuon": lambda model: [DistributedMuon(both(model), Grid.alone(), strategy="owner")],
}
ADAMWS = {
    "MuonW, all AdamW": lambda model: [MuonW(all_adamw(model))],
    "Zero1AdamW": lambda model: [Zero1AdamW(all_adamw(model), Grid.alone())],
    "torch.optim.AdamW": lambda model: [torch.optim.AdamW(model.named_parameters(), **ADAMW)],
}
OTHERS = {
    "torch.optim.Muon": beside_adamw(lambda params: torch.optim.Muon(params, lr=0.02)),
    "torch.optim.SGD": lambda model: [torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)],
    "torch.optim.AdamW, amsgrad": lambda model: [torch.optim.AdamW(model.parameters(), amsgrad=True)],
}
MAKE: dict[str, Make] = HYBRID | ADAMWS | OTHERS


def family(kind: str) -> str:
    """Return what two optimizers have in common that train every parameter by the same algorithm."""
    return "hybrid" if kind in HYBRID else "AdamW" if kind in ADAMWS else kind


def go(model: nn.Module, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        for name, p in model.named_parameters():
            p.grad = synthetic(f"{name} {step}", p.shape, torch.bfloat16).to(p.dtype)
        for optimizer in optimizers:
            optimizer.step()


def training(kind: str, dtype: torch.dtype, steps: range) -> tuple[Small, list[Optimizer]]:
    model = Small(dtype)
    optimizers = MAKE[kind](model)
    go(model, optimizers, steps)
    return model, optimizers


def everything(model: nn.Module, optimizers: list[Optimizer]) -> Any:
    """Return a copy of all that a refusal must leave as it was."""
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers]
    return copy.deepcopy((model.state_dict(), state_by_name(model, optimizers), groups))


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two) and one.dtype == two.dtype
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def state_by_name(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, dict[str, Tensor]]:
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {names[p]: dict(state) for optimizer in optimizers for p, state in optimizer.state.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], tuple[Path, Any, Any]]:
    """Every optimizer's folder, and its training as it was then."""
    folder, found = tmp_path_factory.mktemp("optimizers"), {}

    def get(kind: str, dtype: torch.dtype) -> tuple[Path, Any, Any]:
        if (kind, dtype) not in found:
            path = folder / f"{kind} {dtype}"
            model, optimizers = training(kind, dtype, range(STEPS))
            save(path, model, optimizers, {"by": kind})
            found[kind, dtype] = path, model, optimizers
        return found[kind, dtype]

    return get


@pytest.mark.parametrize(
    ("there", "here", "dtype"),
    [(there, here, torch.float32) for there in MAKE for here in MAKE]
    + [(there, here, torch.bfloat16) for there in MAKE for here in MAKE if family(there) == family(here)],
)
def test_a_state_is_converted_or_refused_before_anything_has_changed(
    saved: Any, there: str, here: str, dtype: torch.dtype
) -> None:
    folder, was, by = saved(there, dtype)
    model, optimizers = training(here, dtype, range(7, 9))
    sharded = [any(isinstance(o, ShardedOptimizer) for o in each) for each in (by, optimizers)]
    narrows = dtype == torch.bfloat16 and sharded == [True, False]
    if family(there) != family(here) or narrows:
        before = everything(model, optimizers)
        with pytest.raises(CheckpointError, match="master weights" if family(there) == family(here) else None) as error:
            load(folder, model, optimizers)
        assert "load the weights alone" in message(error)
        assert same(before, everything(model, optimizers))
        return
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert load(folder, model, optimizers) == {"by": there}
    said = [str(one.message) for one in warned if "its state was made by" in str(one.message)]
    names = [{type(o).__name__ for o in each} for each in (by, optimizers)]
    assert len(said) == (names[0] != names[1])
    if sharded[0] == sharded[1]:
        assert same(state_by_name(model, optimizers), state_by_name(was, by))
    if dtype == torch.float32 or there == here:  # in bfloat16 they round at other places
        go(model, optimizers, range(STEPS, 2 * STEPS))
        never_stopped, _ = training(there, dtype, range(2 * STEPS))
        assert same(never_stopped.state_dict(), model.state_dict())


# ---- Names, groups and options ----------------------------------------------------------------------------


def turned(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same groups in another order, and their parameters too, those of AdamW in a group each."""
    muon, adamw = groups
    apart = [adamw | {"params": [pair]} for pair in reversed(adamw["params"])]
    return [*apart, muon | {"params": muon["params"][::-1]}]


def test_parameters_are_matched_by_name_in_any_order_and_group(saved: Any) -> None:
    folder, *_ = saved("MuonW", torch.float32)
    model = Small()
    optimizers: list[Optimizer] = [DistributedMuon(turned(both(model)), Grid.alone())]
    for group in optimizers[0].param_groups:
        group |= {"lr": 7.0, "weight_decay": 0.7} | ({"betas": (0.1, 0.2)} if "betas" in group else {"momentum": 0.1})
    with pytest.warns(UserWarning, match="its groups were divided otherwise; parameters are matched by name"):
        load(folder, model, optimizers)
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.01, 0.01, 0.02]
    never_stopped, _ = training("MuonW", torch.float32, range(2 * STEPS))
    go(model, optimizers, range(STEPS, 2 * STEPS))
    assert same(never_stopped.state_dict(), model.state_dict())
    assert all(same(state["step"], torch.tensor(4.0)) for state in optimizers[0].state.values() if "step" in state)


def test_a_group_of_parameters_that_had_other_options_each_is_refused(tmp_path: Path) -> None:
    model = Small()
    optimizer = MuonW(turned(both(model)))
    optimizer.param_groups[1]["lr"] = 0.5
    save(tmp_path / "saved", model, optimizer)
    other = Small()
    resumed: list[Optimizer] = [MuonW(both(other))]
    before = everything(other, resumed)
    with pytest.raises(CheckpointError, match="were in groups with another lr each; divide") as error:
        load(tmp_path / "saved", other, resumed)
    message(error)
    assert same(before, everything(other, resumed))


def test_each_algorithm_gets_its_own_options_and_what_schedulers_noted(tmp_path: Path) -> None:
    model = Small()
    optimizer = MuonW(both(model))
    for group in optimizer.param_groups:
        group |= {"momentum": 0.7, "initial_lr": 0.5}  # as OneCycleLR leaves them
    save(tmp_path / "saved", model, optimizer)
    beside, distributed_one, own = Small(), Small(), Small()
    pair = MAKE["Muon"](beside)
    one, alike = DistributedMuon(both(distributed_one), Grid.alone()), MuonW(both(own))
    for there, into in ((beside, pair), (distributed_one, [one]), (own, [alike])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(tmp_path / "saved", there, into)
    assert (pair[0].param_groups[0]["momentum"], pair[0].param_groups[0]["initial_lr"]) == (0.7, 0.5)
    assert pair[1].param_groups[0]["betas"] == one.param_groups[1]["betas"] == (0.7, 0.95)
    assert "momentum" not in pair[1].param_groups[0]
    assert "algorithm" not in pair[1].param_groups[0]
    assert alike.param_groups[1]["betas"] == (0.8, 0.95)
    assert alike.param_groups[1]["momentum"] == 0.7


def test_matrices_that_the_map_does_not_know_are_refused(tmp_path: Path) -> None:
    model = Small()
    fused = [group | {"matrices": ("rows", 2)} if group["algorithm"] == "muon" else group for group in both(model)]
    save(tmp_path / "saved", model, DistributedMuon(fused, Grid.alone()))
    other = Small()
    with pytest.raises(CheckpointError, match=r"the option matrices of .* is \('rows', 2\) in the checkpoint"):
        load(tmp_path / "saved", other, DistributedMuon(both(other), Grid.alone()))


# ---- Master weights ---------------------------------------------------------------------------------------


def test_masters_that_a_state_lacks_are_made_and_kept_in_every_later_save(saved: Any, tmp_path: Path) -> None:
    folder, was, by = saved("MuonW", torch.bfloat16)
    model, optimizers = training("DistributedMuon", torch.bfloat16, range(7, 9))
    with pytest.warns(UserWarning, match="it keeps no master weights, so they are made from the parameters"):
        load(folder, model, optimizers)
    exact = Small()
    reference = MuonW(both(exact))  # in float32, from the rounded parameters and momenta
    exact.load_state_dict(was.state_dict())
    for name, p in exact.named_parameters():
        reference.state[p].update({k: v.to(torch.float32) for k, v in state_by_name(was, by)[name].items()})
    go(model, optimizers, range(STEPS, 2 * STEPS))
    for step in range(STEPS, 2 * STEPS):
        for name, p in exact.named_parameters():
            p.grad = synthetic(f"{name} {step}", p.shape, torch.bfloat16).float()
        reference.step()
    for name, state in state_by_name(model, optimizers).items():
        assert torch.equal(state["master_weight"].view(exact.get_parameter(name).shape), exact.get_parameter(name))
    save(tmp_path / "again", model, optimizers)
    again, resumed = training("DistributedMuon", torch.bfloat16, range(1))
    load(tmp_path / "again", again, resumed)
    assert same(state_by_name(again, resumed), state_by_name(model, optimizers))


# ---- Several optimizers, and none -------------------------------------------------------------------------


def test_what_is_no_optimizer_or_trains_a_parameter_twice_is_refused(tmp_path: Path) -> None:
    model = Small()
    refused = {
        "dict is no optimizer": [{}],
        "'one.weight' is in two groups": [MuonW(both(model)), MuonW([("w", model.one.weight)])],
        "a parameter of shape .* that the model has not": MuonW(both(Small())),
    }
    for words, optimizers in refused.items():
        with pytest.raises(CheckpointError, match=words) as error:
            save(tmp_path / "saved", model, optimizers)  # type: ignore[arg-type]
        message(error)
    assert list(tmp_path.iterdir()) == []


def test_weights_go_in_and_out_without_an_optimizer(saved: Any, tmp_path: Path) -> None:
    folder, was, _ = saved("MuonW", torch.float32)
    for source in (folder, tmp_path / "alone"):
        model = Small()
        model.seen.add_(5)
        assert load(source, model) == {"by": "MuonW"} if source == folder else load(source, model) == {}
        assert same(model.state_dict(), was.state_dict())
        if source == folder:
            save(tmp_path / "alone", model)
    model, optimizers = training("MuonW", torch.float32, range(1))
    before = everything(model, optimizers)
    with pytest.raises(CheckpointError, match="keeps weights alone; load them without an optimizer") as error:
        load(tmp_path / "alone", model, optimizers)
    message(error)
    assert same(before, everything(model, optimizers))
