"""torch's conventions for optimizers, asked of ours: what trains torch's trains ours alike, or is refused aloud."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import math
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing  # which tells ForkingPickler how tensors travel
from helpers_math import distance, gaussian, message
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, lr_scheduler

from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muon import Muon
from distmuon.optim.muonw import MuonW
from distmuon.optim.options import OPTIONS
from distmuon.optim.param_groups import split_parameters
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from muon_conformance.programs import PROGRAMS, SmallNet, loss_of, step, train

ADAMW: dict[str, Any] = dict(lr=0.02, weight_decay=0.1)
MUON: dict[str, Any] = dict(
    lr=0.02, weight_decay=0.1, momentum_kind="average", compute_dtype=torch.float32, batched=False
)
OURS: dict[str, Callable[..., Optimizer]] = {
    "Muon": lambda params, **options: Muon(params, **MUON | options),
    "MuonW": lambda params, **options: MuonW(params, gather_dtype=torch.float32, **MUON | options),
    "Zero1AdamW": lambda params, **options: Zero1AdamW(params, Grid.alone(), **ADAMW | options),
    "DistributedMuon": lambda params, **options: DistributedMuon(
        params, Grid.alone(), gather_dtype=torch.float32, **MUON | options
    ),
}
SHARDED = ("Zero1AdamW", "DistributedMuon")
# torch's Muon multiplies in bf16; and a DistributedMuon on a grid of one rank is a Muon, which the first row judges
ORACLES: dict[str, tuple[Callable[..., Optimizer], float]] = {
    "Muon": (lambda params: torch.optim.Muon(params, lr=0.02, adjust_lr_fn="match_rms_adamw"), 0.05),
    "Zero1AdamW": (lambda params: torch.optim.AdamW(params, **ADAMW), 1e-5),
    "MuonW": (OURS["Muon"], 1e-5),
    "DistributedMuon": (OURS["Muon"], 1e-5),
}
REFUSED = {  # what a sharded optimizer cannot do as torch's do; it says so
    "the distributed checkpoints state by names": (ValueError, "this is no state of a sharded optimizer"),
    "a model and its optimizer are copied by deepcopy": (TypeError, "cannot be copied or pickled"),
    "a model and its optimizer are copied by pickle": (TypeError, "cannot be copied or pickled"),
    "a parameter is replaced in its group": (RuntimeError, "the groups hold other parameters"),
    "a parameter is taken out of its group": (RuntimeError, "the groups hold other parameters"),
}
each = pytest.mark.parametrize("kind", OURS)
each_sharded = pytest.mark.parametrize("kind", SHARDED)


def start(kind: str, **options: Any) -> tuple[SmallNet, Optimizer]:
    model = SmallNet()
    return model, OURS[kind](model.parameters(), **options)


def state_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


START = state_of(SmallNet())


@each
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("error", "ignore:Using backward.. with create_graph=True", "ignore:no parameter of this")
def test_a_program_of_torchs_users_trains_alike(kind: str, name: str) -> None:
    if kind in SHARDED and name in REFUSED:
        refusal, words = REFUSED[name]
        with pytest.raises(refusal, match=words) as error:
            PROGRAMS[name](lambda model: OURS[kind](model.parameters()))
        message(error)
        return
    oracle, tolerance = ORACLES[kind]
    expected, saw = PROGRAMS[name](lambda model: oracle(model.parameters()))
    found, sees = PROGRAMS[name](lambda model: OURS[kind](model.parameters()))
    start = START if len(state_of(found)) == len(START) else 0 * state_of(found)
    assert distance(state_of(found) - start, state_of(expected) - start) < tolerance
    flat, expected_flat = (
        [x for row in rows for x in (row if isinstance(row, list) else [row])] for rows in (sees, saw)
    )
    assert flat == pytest.approx(expected_flat, rel=tolerance, abs=1e-9, nan_ok=True)


# ---- Copies and states ------------------------------------------------------------------------------------


@each
def test_a_step_that_is_compiled_is_the_same_step(kind: str) -> None:
    (plain, optimizer), (compiled, other) = start(kind), start(kind)
    torch._dynamo.reset()
    compiler: Any = torch.compile(other.step, backend="eager")  # which needs no C++ compiler
    for model, take in ((plain, optimizer.step), (compiled, compiler)):
        for i in range(2):
            loss_of(model, i).backward()
            take()
            model.zero_grad()
    assert torch.equal(state_of(plain), state_of(compiled))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_does_not_take_the_steps_of_a_muon_whose_step_a_schedule_has_wrapped(copied: Callable) -> None:
    model, optimizer = start("Muon")
    lr_scheduler.ConstantLR(optimizer)
    train(model, optimizer, 2)
    twin, theirs = copied((model, optimizer))
    train(model, optimizer, 2, first=2)
    train(twin, theirs, 2, first=2)
    assert torch.equal(state_of(model), state_of(twin))
    theirs.add_param_group({"params": [nn.Parameter(gaussian(3, 3))]})


STATE = {"Muon": {"momentum_buffer"}, "Zero1AdamW": {"step", "exp_avg", "exp_avg_sq"}}


@each
def test_the_state_is_where_torch_has_it(kind: str) -> None:
    model, optimizer = start(kind)
    assert not any(optimizer.state[p] for p in model.parameters())
    optimizer.state.clear()
    model.second.requires_grad_(False)
    step(model, optimizer, 0)
    names = STATE.get(kind, STATE["Muon"])
    assert optimizer.state[model.first.weight].keys() == names
    assert not optimizer.state.get(model.second.weight)
    moment = optimizer.state[model.first.weight][max(names - {"step", "exp_avg_sq"})]
    assert moment.numel() == model.first.weight.numel()
    saved = optimizer.state_dict()
    assert saved.keys() >= {"state", "param_groups"}
    assert saved["param_groups"][0]["params"] == [0, 1]
    assert saved["state"][0].keys() == names


@each
@pytest.mark.parametrize(("saves", "loads"), [(True, True), (True, False), (False, True)])
def test_a_state_goes_through_a_file_with_names_or_without(kind: str, saves: bool, loads: bool) -> None:
    def over(model: nn.Module, named: bool, **options: Any) -> Optimizer:
        return OURS[kind](model.named_parameters() if named else model.parameters(), **options)

    model, other, file = SmallNet(), SmallNet(), io.BytesIO()
    optimizer = over(model, saves, lr=0.05)
    train(model, optimizer, 2)
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(model.state_dict())
    resumed = over(other, loads)
    resumed.load_state_dict(torch.load(file))  # weights_only, torch's default
    assert resumed.param_groups[0]["lr"] == 0.05
    train(model, optimizer, 2, first=2)
    train(other, resumed, 2, first=2)
    assert torch.equal(state_of(model), state_of(other))


@each
def test_a_state_of_other_groups_is_refused(kind: str) -> None:
    _, optimizer = start(kind)
    saved = optimizer.state_dict()
    other = OURS[kind]([{"params": [p]} for p in SmallNet().parameters()])
    with pytest.raises(ValueError, match=r"group"):
        other.load_state_dict(saved)
    fewer = OURS[kind]([gaussian(8, 6).requires_grad_()])
    with pytest.raises(ValueError, match=r"group|parameters"):
        fewer.load_state_dict(saved)


@each
def test_hooks_of_saving_and_loading_run_and_may_replace_the_state(kind: str) -> None:
    model, optimizer = start(kind)
    seen: list[str] = []

    def tagged(o: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        seen.append("saved")
        return state | {"tag": 7}

    def relaxed(o: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(f"loads tag {state['tag']}")
        state = {**copy.deepcopy(state)}
        del state["tag"]
        state["param_groups"][0]["lr"] = 0.25
        return state

    optimizer.register_state_dict_pre_hook(lambda o: seen.append("saves"))
    optimizer.register_state_dict_post_hook(tagged)
    optimizer.register_load_state_dict_pre_hook(relaxed)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(f"loaded {o.param_groups[0]['lr']}"))
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saves", "saved", "loads tag 7", "loaded 0.25"]
    train(model, optimizer, 1)


@each
def test_a_saved_layer_takes_no_more_room_than_the_layer(kind: str) -> None:
    model = SmallNet()
    wide = nn.Parameter(gaussian(300, 200))
    OURS[kind]([*model.parameters(), wide])
    file = io.BytesIO()
    torch.save(model.first.state_dict(), file)
    assert len(file.getvalue()) < 20_000


# ---- Groups and options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Muon", "MuonW"])
def test_a_group_that_is_refused_later_leaves_no_trace(kind: str) -> None:
    model, optimizer = start(kind)
    late, bias = nn.Parameter(gaussian(3, 5)), nn.Parameter(torch.ones(3))
    for group, words in (
        ({"params": [late], "lr": -1.0}, "lr=-1.0"),
        ({"params": [late], "l": 1}, "'l'"),
        ({"params": [("bias", bias)], "algorithm": "muon"}, "1 dimension"),
        ({"params": [late, model.first.weight]}, "more than one"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            optimizer.add_param_group(group)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    train(model, optimizer, 1)


def test_a_layer_that_is_refused_in_its_second_part_leaves_nothing_behind() -> None:
    model, twice = SmallNet(), nn.Linear(5, 5)
    optimizer = MuonW([{"params": list(model.parameters())}, {"params": [twice.bias], "algorithm": "adamw"}])
    with pytest.raises(ValueError, match="more than one"):
        optimizer.add_param_group({"params": twice.parameters()})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


@each
def test_a_group_may_hold_what_schedulers_note(kind: str) -> None:
    optimizer = OURS[kind]([{"params": SmallNet().parameters(), "initial_lr": 0.3, "max_momentum": 0.9, "name": "all"}])
    lr_scheduler.StepLR(optimizer, 2, last_epoch=3)  # wants `initial_lr`, as after a resumption
    assert optimizer.param_groups[0]["name"] == "all"


@each_sharded
def test_a_group_cannot_join_a_sharded_optimizer_later(kind: str) -> None:
    model, optimizer = start(kind)
    with pytest.raises(RuntimeError, match="constructor") as error:
        optimizer.add_param_group({"params": [nn.Parameter(gaussian(3, 5))]})
    message(error)
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, 1)


@pytest.mark.parametrize("kind", ["Muon", "MuonW"])
@pytest.mark.parametrize("first_named", [True, False])
@pytest.mark.parametrize("then_named", [True, False])
def test_a_layer_can_join_with_and_without_names(kind: str, first_named: bool, then_named: bool) -> None:
    model, grown = SmallNet(), nn.Linear(5, 5, bias=kind == "MuonW")
    optimizer = OURS[kind](model.named_parameters() if first_named else model.parameters())
    optimizer.add_param_group({"params": grown.named_parameters() if then_named else grown.parameters(), "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups[1:]] == [0.5] * len(list(grown.parameters()))
    before = [p.detach().clone() for p in grown.parameters()]
    grown(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, grown.parameters(), strict=True))


# ---- An optimizer that trains nothing, or not all ------------------------------------------------------------


@each
def test_an_optimizer_whose_parameters_get_no_gradient_says_so_once(kind: str) -> None:
    _, optimizer = start(kind)
    other = SmallNet()  # as after load_state_dict(assign=True), to_empty, or adapters that came later
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            loss_of(other, number).backward()
            optimizer.step()
    (once,) = said
    assert re.match(f"no parameter of this {kind} has a gradient.*make the optimizer after", str(once.message))


@pytest.mark.filterwarnings("ignore:Muon gets nothing")
@each
def test_a_layer_that_is_unfrozen_later_trains_or_is_said_not_to(kind: str) -> None:
    model = SmallNet()
    model.first.requires_grad_(False)
    algorithm = "adamw" if kind == "Zero1AdamW" else "muon"
    optimizer = OURS[kind]([group | {"algorithm": algorithm} for group in split_parameters(model)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2)
    model.first.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"'first.weight' was frozen.*split_parameters\(model, frozen=True\)") as said:
        train(model, optimizer, 2)
    assert len(said) == 1


# ---- The default learning rate -------------------------------------------------------------------------------

DEFAULT: dict[str, Callable[..., list[Optimizer]]] = {  # optimizers of a whole model, as little said as can be
    "Muon": lambda model, **lr: [
        Muon([model.first.weight, model.hidden.weight], **lr),
        AdamW([model.second.weight], **lr),
    ],
    "MuonW": lambda model, **lr: [MuonW(model, **lr)],
    "DistributedMuon": lambda model, **lr: [DistributedMuon(split_parameters(model), Grid.alone(), **lr)],
    "Zero1AdamW": lambda model, **lr: [Zero1AdamW(model.parameters(), Grid.alone(), **lr)],
}


class Wide(nn.Module):
    """SmallNet with a wide hidden matrix between, whose elements are as small as those of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(6, 128, bias=False), nn.Linear(128, 128, bias=False)
        self.second = nn.Linear(128, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 4]
        h = self.first(x).tanh()
        return self.second(h + self.hidden(h))


@functools.cache
def trained() -> Wide:
    """Return a network at the end of its training, whose loss is that of the noise in its labels."""
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 150)
    for number in range(150):
        optimizer.zero_grad()
        noisy_loss(model, number).backward()
        optimizer.step()
        schedule.step()
    return model


def noisy_loss(model: nn.Module, number: int) -> Tensor:
    x, noise = gaussian(256, 6, seed=number), gaussian(256, 4, seed=1000 + number)
    return (model(x) - (x[:, :4] * x[:, 2:]).tanh() - 0.5 * noise).square().mean()


def rise(model: Wide, optimizers: list[Optimizer]) -> float:
    """Return by what part one step changes the loss on fresh data."""
    before = noisy_loss(model, 999).item()
    noisy_loss(model, 500).backward()
    for optimizer in optimizers:
        optimizer.step()
    return noisy_loss(model, 999).item() / before - 1


@pytest.mark.parametrize("kind", DEFAULT)
def test_one_step_at_the_default_rate_does_no_harm_to_a_trained_model(kind: str) -> None:
    found = {}
    for name, options in {"default": {}, "0.02": {"lr": 0.02}}.items():
        model = copy.deepcopy(trained())
        found[name] = rise(model, DEFAULT[kind](model, **options))
    assert found["default"] < 0.01
    assert found["0.02"] > 0.1


@pytest.mark.parametrize(
    "make",
    [MuonW, lambda model, **options: DistributedMuon(split_parameters(model), Grid.alone(), **options)],
    ids=["MuonW", "DistributedMuon"],
)
def test_adamw_may_have_a_rate_of_its_own(make: Callable[..., Optimizer]) -> None:
    optimizer = make(SmallNet(), lr=0.01, adamw_lr=0.003)
    assert {group["algorithm"]: group["lr"] for group in optimizer.param_groups} == {"muon": 0.01, "adamw": 0.003}
    groups = [{"params": [p], "algorithm": "adamw", "lr": 0.5} for p in SmallNet().parameters()]
    assert {group["lr"] for group in MuonW(groups, adamw_lr=0.003).param_groups} == {0.5}
    with pytest.raises(ValueError, match="-1"):
        make(SmallNet(), adamw_lr=-1.0)


def test_muonw_of_a_model_decays_no_norm_and_no_bias() -> None:
    optimizer = MuonW(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), weight_decay=0.3)
    decays = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    matrices = {"0.weight": 0.3, "2.weight": 0.3}
    assert decays == matrices | dict.fromkeys(["0.bias", "1.weight", "1.bias", "2.bias"], 0.0)


def test_a_schedule_moves_both_algorithms_of_a_distributed_muon() -> None:
    model = SmallNet()
    groups = [
        {"params": [model.first.weight], "algorithm": "muon"},
        {"params": [model.second.weight], "algorithm": "adamw"},
    ]
    optimizer = DistributedMuon(groups, Grid.alone())
    scheduler = lr_scheduler.OneCycleLR(optimizer, [0.3, 0.03], total_steps=9)
    seen = []
    for i in range(3):
        step(model, optimizer, i)
        scheduler.step()
        muon, adamw = optimizer.param_groups
        seen.append([muon["lr"], muon["momentum"], adamw["lr"]])
    assert all(len(set(column)) == 3 for column in zip(*seen, strict=True)), seen


def test_momentum_that_a_schedule_sets_is_adamws_first_beta() -> None:
    ends = []
    for option in ("momentum", "betas"):
        model = SmallNet()
        optimizer = Zero1AdamW(model.parameters(), Grid.alone(), lr=0.1)
        for i in range(3):
            optimizer.param_groups[0][option] = 0.5 if option == "momentum" else (0.5, 0.999)
            step(model, optimizer, i)
        ends.append(state_of(model))
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], START)


# ---- Options that cannot be -----------------------------------------------------------------------------------

WRONG_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "lr is NaN": ({"lr": math.nan}, "lr"),
    "lr is infinite": ({"lr": math.inf}, "lr"),
    "lr is negative": ({"lr": -0.1}, "lr"),
    "decay is NaN": ({"weight_decay": math.nan}, "weight_decay"),
    "decay is negative": ({"weight_decay": -0.5}, "weight_decay"),
    "momentum is 1.5": ({"momentum": 1.5}, "momentum"),
    "a momentum nobody has": ({"momentum_kind": "ema"}, "'ema'"),
    "a scale nobody has": ({"scale": "orignal"}, "scale is 'orignal'; choose one of match_rms, original"),
    "coefficients nobody has": ({"ns_coefficients": "polar_expres"}, "'polar_expres'"),
    "fewer steps than none": ({"ns_steps": -3}, "-3"),
    "a form nobody has": ({"ns_form": "grams"}, "'grams'"),
    "a norm nobody has": ({"ns_norm": "bf16"}, "'bf16'"),
    "a dtype in which nothing multiplies": (
        {"compute_dtype": torch.int32},
        "compute_dtype is torch.int32; give 'auto'",
    ),
    "a dtype by name": ({"compute_dtype": "bf16"}, "compute_dtype is 'bf16'; give 'auto'"),
    "an input dtype that holds no momentum": (
        {"input_dtype": torch.float16},
        "input_dtype is torch.float16; give None",
    ),
    "matrices nobody has": ({"matrices": "staked"}, "'staked'"),
    "an input norm nobody has": ({"input_norm": "row"}, "input_norm is 'row'; choose one of rows, columns, both, or"),
    "an output norm nobody has": ({"output_norm": "both"}, "output_norm is 'both'; choose one of rows, columns, rows_"),
    "NorMuon forgets nothing": ({"normuon_beta2": 1.0}, "normuon_beta2 is 1.0; give 0 or more and less than 1"),
    "three words": ({"ns_coefficients": [(1, 2, "x")]}, "coefficients are [(1, 2, 'x')]; every quintic has exactly"),
    "a row and a number": ({"ns_coefficients": [(1, 2, 3), 4]}, "coefficients are [(1, 2, 3), 4]; every quintic has"),
    "a tensor of rows": ({"ns_coefficients": torch.ones(3)}, "coefficients are tensor([1., 1., 1.]); give one of"),
    "no row at all": ({"ns_coefficients": (1.0, math.nan, 2.0)}, "coefficients are (1.0, nan, 2.0); every quintic has"),
    "two truths": ({"nesterov": torch.ones(2)}, "nesterov is tensor([1., 1.]); give True or False."),
    "steps in two": ({"ns_steps": torch.ones(2)}, "steps is tensor([1., 1.]); Newton–Schulz needs a whole number"),
    "decay with any care": ({"cautious_decay": "yes"}, "cautious_decay is 'yes'; give True or False."),
    "betas above 1": ({"betas": (1.5, 0.9)}, "betas"),
    "eps below 0": ({"eps": -1e-8}, "eps"),
    "lr as YAML reads 1e-3": ({"lr": "1e-3"}, "lr is '1e-3'; give a number (what was read from a file as text"),
    "no lr": ({"lr": None}, "lr is None; give a number."),
    "lr is a list": ({"lr": [0.1]}, "lr is [0.1]; give a number."),
    "lr is complex": ({"lr": torch.tensor(1j)}, "lr is tensor"),
    "two rates": ({"lr": torch.ones(2)}, "lr is a tensor of 2 elements; give one."),
    "no decay": ({"weight_decay": None}, "weight_decay is None; give a number."),
    "no momentum": ({"momentum": None}, "momentum is None; give a number."),
    "Nesterov in words": ({"nesterov": "no"}, "nesterov is 'no'; give True or False."),
    "batched in words": ({"batched": "no"}, "batched is 'no'; give True or False."),
    "half a step": ({"ns_steps": 5.0}, "steps is 5.0; Newton–Schulz needs a whole number"),
    "a number of steps as text": ({"ns_steps": "5"}, "steps is '5'; Newton–Schulz needs a whole number"),
    "one coefficient": ({"ns_coefficients": 5}, "coefficients are 5; give one of muon"),
    "NorMuon as text": ({"normuon_beta2": "0.9"}, "normuon_beta2 is '0.9'; give a number"),
    "one beta": ({"betas": 0.9}, "betas is 0.9; give two numbers."),
    "three betas": ({"betas": (0.9, 0.9, 0.9)}, "betas is (0.9, 0.9, 0.9); give two numbers."),
    "a beta as text": ({"betas": ("0.9", 0.999)}, "betas[0] is '0.9'; give a number"),
    "no eps": ({"eps": None}, "eps is None; give a number."),
    "another algorithm": ({"algorithm": "sgd"}, "sgd"),
    "an option of torch's": ({"maximize": True}, "'maximize'"),
    "a typo": ({"weight_deca": 0.3}, "'weight_deca'"),
}
each_wrong_option = pytest.mark.parametrize("case", WRONG_OPTIONS)


@each
@each_wrong_option
def test_an_option_that_cannot_be_is_refused_wherever_it_is_given(kind: str, case: str) -> None:
    change, words = WRONG_OPTIONS[case]
    (option,) = change
    if kind not in ("MuonW", "DistributedMuon") or option not in ("betas", "eps"):  # which are for other groups
        with pytest.raises((TypeError, ValueError), match=f"{re.escape(words)}|unexpected keyword argument '{option}'"):
            OURS[kind](SmallNet().parameters(), **change)
    with pytest.raises((TypeError, ValueError), match=rf"{re.escape(words)}|unknown option\(s\) '{option}'") as error:
        OURS[kind]([{"params": SmallNet().parameters()} | change])
    message(error)


@each
@each_wrong_option
def test_an_option_that_is_set_wrong_later_is_refused_before_a_weight_moves(kind: str, case: str) -> None:
    change, words = WRONG_OPTIONS[case]
    model, optimizer = start(kind)
    train(model, optimizer, 1)
    (group,) = optimizer.param_groups
    if not change.keys() & {*group, "algorithm", "weight_deca"}:
        return  # this algorithm has no such option
    before = state_of(model), copy.deepcopy([optimizer.state[p] for p in model.parameters()])
    kept = dict(group)
    group |= change
    with pytest.raises((ValueError, TypeError), match=re.escape(words)) as error:
        train(model, optimizer, 1)
    message(error)
    assert torch.equal(before[0], state_of(model))
    for saved, p in zip(before[1], model.parameters(), strict=True):
        assert all(torch.equal(value, optimizer.state[p][key]) for key, value in saved.items())
    group.clear()
    group |= kept
    train(model, optimizer, 1)
    assert not torch.equal(before[0], state_of(model))


@pytest.mark.parametrize("kind", ["Muon", "Zero1AdamW", "DistributedMuon"])
def test_a_group_may_not_become_the_other_algorithms(kind: str) -> None:
    model, optimizer = start(kind)
    other = "muon" if kind == "Zero1AdamW" else "adamw"
    optimizer.param_groups[0].update(OPTIONS[other] | {"algorithm": other})
    before = state_of(model)
    with pytest.raises(ValueError, match="algorithm") as error:
        train(model, optimizer, 1)
    message(error)
    assert torch.equal(before, state_of(model))


NO_NUMBER_OF_ELEMENTS = "a whole number of elements, 1 or more"
WRONG_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {  # of an optimizer, and no option of its groups
    "a bucket of text": ({"bucket_size": "1e6"}, f"bucket_size is '1e6'; give {NO_NUMBER_OF_ELEMENTS}"),
    "a bucket and a half": ({"bucket_size": 1.5}, f"bucket_size is 1.5; give {NO_NUMBER_OF_ELEMENTS}"),
    "a bucket of nothing": ({"bucket_size": 0}, f"bucket_size is 0; give {NO_NUMBER_OF_ELEMENTS}"),
    "buckets in a list": ({"bucket_size": [1]}, f"bucket_size is [1]; give {NO_NUMBER_OF_ELEMENTS}"),
    "a bucket that is no number": ({"bucket_size": math.nan}, f"bucket_size is nan; give {NO_NUMBER_OF_ELEMENTS}"),
    "no bucket": ({"bucket_size": None}, f"bucket_size is None; give {NO_NUMBER_OF_ELEMENTS}"),
    "masters in words": ({"master_weights": "yes"}, "master_weights is 'yes'; give True or False."),
    "two masters": ({"master_weights": torch.ones(2)}, "master_weights is tensor([1., 1.]); give True or False."),
    "a size for replicas": ({"replicas": 4}, "replicas is 4; give a process group"),
    "broadcast in words": ({"broadcast": "no"}, "broadcast is 'no'; give True or False."),
    "overlap in words": ({"overlap_forward": "no"}, "overlap_forward is 'no'; give True or False."),
    "checked by half": ({"check_every": 0.5}, "check_every is 0.5; give a number of steps"),
    "a strategy by number": ({"strategy": 5}, "strategy is 5; choose one of"),
    "no strategy": ({"strategy": None}, "strategy is None; choose one of"),
    "options in a list": ({"strategy_options": [5]}, "strategy_options is [5]; give names with values"),
}


@each
@pytest.mark.parametrize("case", WRONG_SETTINGS)
def test_a_setting_that_cannot_be_is_refused_in_a_sentence(kind: str, case: str) -> None:
    ((name, value),), words = WRONG_SETTINGS[case][0].items(), WRONG_SETTINGS[case][1]
    if name not in inspect.signature(globals()[kind]).parameters or (kind, value) == ("MuonW", None):
        return
    model = SmallNet()
    where = [p.data_ptr() for p in model.parameters()]
    with pytest.raises((TypeError, ValueError), match=re.escape(words)) as error:
        OURS[kind](model.parameters(), **{name: value})
    message(error)
    assert where == [p.data_ptr() for p in model.parameters()]
    if name == "bucket_size":
        OURS[kind](model.parameters(), bucket_size=2.5e7)


@each_sharded
@pytest.mark.parametrize(
    ("name", "value"),
    [("max_norm", -1.0), ("max_norm", math.nan), ("max_norm", "1"), ("on_nonfinite", "skp"), ("check_every", "x")],
)
def test_a_setting_that_is_set_wrong_later_is_refused_before_a_weight_moves(kind: str, name: str, value: Any) -> None:
    model, optimizer = start(kind)
    train(model, optimizer, 1)
    before, kept = state_of(model), getattr(optimizer, name)
    setattr(optimizer, name, value)
    with pytest.raises((TypeError, ValueError), match=f"{name} is {value!r}") as error:
        train(model, optimizer, 1)
    message(error)
    assert torch.equal(before, state_of(model))
    setattr(optimizer, name, kept)
    train(model, optimizer, 1)


NO_GROUPS: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: {"params": None}, "holds None (NoneType); give tensors"),
    "a number": (lambda: {"params": 5}, "holds 5 (int); give tensors"),
    "a module": (lambda: {"params": SmallNet()}, "holds a module (SmallNet); give its parameters"),
    "a module in a list": (lambda: {"params": [SmallNet()]}, "holds a module (SmallNet); give its parameters"),
    "a named module": (lambda: {"params": [("net", SmallNet())]}, "holds a module (SmallNet); give its parameters"),
    "modules": (lambda: {"params": nn.ModuleList([SmallNet()])}, "holds a module (SmallNet); give its parameters"),
    "a name": (lambda: {"params": ["weight"]}, "holds 'weight' (str); give tensors, or pairs"),
    "a dict": (lambda: {"params": dict(SmallNet().named_parameters())}, "; give tensors, or pairs (name, tensor)"),
    "a name alone": (lambda: {"params": [("weight",)]}, "holds ('weight',) (tuple); give tensors, or pairs"),
    "a number for a name": (lambda: {"params": [(1, nn.Parameter(torch.ones(2, 2)))]}, "; give tensors, or pairs"),
    "too few names": (
        lambda: {"params": [nn.Parameter(torch.ones(2, 2)) for _ in range(3)], "param_names": ["a"]},
        "is ['a'] (list), for 3 parameter(s); give a list with a name for each",
    ),
    "no params": (lambda: {"lr": 0.1}, "is {'lr': 0.1} (dict); give a dict with \"params\""),
}


@each
@pytest.mark.parametrize("case", NO_GROUPS)
def test_what_is_no_group_of_parameters_is_refused_in_a_sentence(kind: str, case: str) -> None:
    make, words = NO_GROUPS[case]
    with pytest.raises(TypeError, match=re.escape(words)) as error:
        OURS[kind]([make()])
    message(error)
    if kind not in SHARDED:
        _, optimizer = start(kind)
        with pytest.raises(TypeError, match=re.escape(words)):
            optimizer.add_param_group(make())
        assert len(optimizer.param_groups) == 1


@each
def test_what_holds_no_parameters_is_refused_and_a_parameter_list_is_taken(kind: str) -> None:
    with pytest.raises(TypeError, match=r"takes parameters and was given None \(NoneType\)") as error:
        OURS[kind](None)
    message(error)
    OURS[kind]([{"params": nn.ParameterList([nn.Parameter(torch.ones(2, 2))])}])


# ---- Sparse gradients -------------------------------------------------------------------------------------


@each_sharded
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_sparse_gradient_is_a_dense_one_in_a_flat_buffer(kind: str, by_hand: bool) -> None:
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(7, 3, sparse=sparse)
        groups = [{"params": [*table.named_parameters()], "algorithm": "adamw"}]
        optimizer = OURS[kind](groups)
        for number in range(2):
            if by_hand:
                gradient = torch.zeros(7, 3).index_fill_(0, torch.tensor([1, 4]), 0.5 + number)
                table.weight.grad = gradient.to_sparse() if sparse else gradient
            else:
                table(torch.tensor([1, 4, 1])).square().sum().backward()
            optimizer.step()
        ends.append(state_of(table))
    assert torch.equal(*ends)


# ---- Memory formats ---------------------------------------------------------------------------------------


def convolutions(kind: str, memory_format: torch.memory_format) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False))
    options = {} if kind == "Zero1AdamW" else {"matrices": "flattened"}
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    return model, OURS[kind]([{"params": [*model.named_parameters()], **options}])


def formats_of(model: nn.Module) -> list[bool]:
    return [p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters()]


def train_convolutions(model: nn.Module, optimizer: Optimizer, memory_format: torch.memory_format) -> None:
    for seed in range(3):
        for p in model.parameters():
            p.grad = gaussian(*p.shape, seed=seed).to(memory_format=memory_format)
        optimizer.step()


@each
def test_kernels_in_channels_last_stay_so_or_it_is_said_that_they_do_not(kind: str) -> None:
    last = torch.channels_last
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, optimizer = convolutions(kind, last)
        train_convolutions(model, optimizer, last)
        model.to(memory_format=last)  # type: ignore[call-overload]
        train_convolutions(model, optimizer, last)
    told = [str(each.message) for each in said if "channels_last" in str(each.message)]
    assert formats_of(model) == [kind not in SHARDED] * 2
    assert len(told) == (kind in SHARDED)
    assert all("parameter '0.weight' and 1 more" in words and words.endswith(".") for words in told)


@each
def test_a_memory_format_moves_no_bit(kind: str) -> None:
    ends = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, optimizer = convolutions(kind, memory_format)
            train_convolutions(model, optimizer, memory_format)
        ends.append(state_of(model))
    assert torch.equal(*ends)


# ---- Clipping ---------------------------------------------------------------------------------------------


each_that_clips = pytest.mark.parametrize("kind", ["MuonW", "Zero1AdamW", "DistributedMuon"])


def with_gradients(kind: str, factor: float = 1.0) -> tuple[nn.Module, Any]:
    model, optimizer = start(kind)
    for number, p in enumerate(model.parameters()):
        p.grad = factor * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    return model, optimizer


@each_that_clips
def test_clipping_takes_what_torchs_function_takes(kind: str) -> None:
    model, optimizer = with_gradients(kind)
    reference = SmallNet()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert q.grad is not None
        p.grad = q.grad.clone()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, 2.0, True)
    assert optimizer.clip_grad_norm_(0.5, 2.0, error_if_nonfinite=True) == pytest.approx(expected.item())
    clipped = optimizer.buffers.gradient_homes if kind in SHARDED else [p.grad for p in model.parameters()]
    for p, gradient in zip(reference.parameters(), clipped, strict=True):
        torch.testing.assert_close(gradient, p.grad)


@each_that_clips
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_an_error_where_that_is_asked_for(kind: str, factor: float) -> None:
    model, optimizer = with_gradients(kind, factor)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(RuntimeError, match=r"the norm of all gradients is (inf|nan)") as error:
        optimizer.clip_grad_norm_(0.5, error_if_nonfinite=True)
    message(error)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, after, strict=True))
    model, optimizer = with_gradients(kind, factor)
    assert not optimizer.clip_grad_norm_(0.5).isfinite()


@each_that_clips
@pytest.mark.parametrize("norm_type", [1, math.inf, "inf", None])
def test_another_norm_is_refused(kind: str, norm_type: Any) -> None:
    _, optimizer = with_gradients(kind)
    with pytest.raises(ValueError, match=rf"norm_type is {norm_type!r}; only the 2-norm is measured") as error:
        optimizer.clip_grad_norm_(0.5, norm_type)
    message(error)
    optimizer.clip_grad_norm_(0.5)


@each_that_clips
@pytest.mark.parametrize("wrong", [None, "1.0", [1.0], -1.0, math.nan, torch.ones(2)])
def test_a_bound_that_no_norm_can_keep_is_refused(kind: str, wrong: Any) -> None:
    _, optimizer = with_gradients(kind)
    with pytest.raises((TypeError, ValueError), match="max_norm is") as error:
        optimizer.clip_grad_norm_(wrong)
    message(error)
    optimizer.clip_grad_norm_(torch.tensor(0.5))


def test_without_parameters_there_is_nothing_to_clip() -> None:
    _, optimizer = with_gradients("MuonW")
    optimizer.param_groups.clear()
    assert optimizer.clip_grad_norm_(0.5) == 0
    _, optimizer = with_gradients("MuonW")
    optimizer.param_groups.insert(0, dict(optimizer.param_groups[0], params=[], param_names=[]))
    assert optimizer.clip_grad_norm_(0.5) > 0.5
    for kind in ("Zero1AdamW", "DistributedMuon"):
        _, optimizer = with_gradients(kind)
        optimizer.param_groups.clear()
        with pytest.raises(RuntimeError, match=r"has 0 parameter group\(s\) and had 1 at construction") as error:
            optimizer.clip_grad_norm_(0.5)
        message(error)


OTHER_GROUPS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "none": lambda groups: groups.clear(),
    "the same once more": lambda groups: groups.append(dict(groups[0])),
    "parameters alone": lambda groups: groups.append({"params": [nn.Parameter(torch.ones(4, 4))]}),
}


@each_sharded
@pytest.mark.parametrize("change", OTHER_GROUPS)
def test_groups_that_are_added_or_taken_away_by_hand_are_refused_before_a_weight_moves(kind: str, change: str) -> None:
    model, optimizer = start(kind)
    before, kept = state_of(model), list(optimizer.param_groups)
    OTHER_GROUPS[change](optimizer.param_groups)
    with pytest.raises(RuntimeError, match=r"has [02] parameter group\(s\) and had 1 at construction") as error:
        train(model, optimizer, 1)
    message(error)
    assert torch.equal(before, state_of(model))
    optimizer.param_groups[:] = kept
    train(model, optimizer, 1)
    assert not torch.equal(before, state_of(model))


@each
@pytest.mark.parametrize("of", ["first", "last"])
def test_a_state_that_was_written_to_in_another_shape_is_refused_before_a_weight_moves(kind: str, of: str) -> None:
    model = SmallNet()
    parameters = list(model.parameters())
    algorithms = ["adamw", "muon"] if kind in ("MuonW", "DistributedMuon") else [None]
    cut = [parameters[:1], parameters[1:]] if len(algorithms) > 1 else [parameters]
    groups = [
        {"params": of_group} | ({"algorithm": algorithm} if algorithm else {})
        for algorithm, of_group in zip(algorithms, cut, strict=True)
    ]
    optimizer = OURS[kind](groups)
    train(model, optimizer, 1)
    spoiled = parameters[0 if of == "first" else -1]
    key = next(key for key in optimizer.state[spoiled] if key != "step")
    optimizer.state[spoiled][key] = torch.zeros(3, 5, 7)
    before = state_of(model)
    with pytest.raises(RuntimeError, match=rf"for its {key} now, and has \[3, 5, 7\] from before") as error:
        train(model, optimizer, 1)
    message(error)
    assert torch.equal(before, state_of(model))
    optimizer.state.pop(spoiled)
    train(model, optimizer, 1)
    assert not torch.equal(before, state_of(model))


@pytest.mark.parametrize(
    ("kind", "words"),
    {"Muon": "MuonW", "Zero1AdamW": "named_parameters", "DistributedMuon": "split_parameters"}.items(),
)
@pytest.mark.parametrize("model", [SmallNet(), nn.Sequential(nn.Linear(2, 2))])
def test_a_model_in_the_place_of_parameters_is_refused_with_what_to_give(
    kind: str, words: str, model: nn.Module
) -> None:
    with pytest.raises(TypeError, match=f"{kind} takes parameters and was given a model.*{words}") as error:
        OURS[kind](model)
    message(error)


DEFAULTS: dict[Callable[..., Any], list[Mapping[str, Any]]] = {
    Muon: [Muon.DEFAULTS],
    MuonW: [*MuonW.DEFAULTS.values()],
    DistributedMuon: [*OPTIONS.values()],
    Zero1AdamW: [*Zero1AdamW.DEFAULTS.values()],
}


@pytest.mark.parametrize("optimizer", DEFAULTS)
def test_a_signature_names_every_option_and_its_default(optimizer: Callable[..., Any]) -> None:
    """So that an editor completes them, and a type checker refuses what is misspelt."""
    named = inspect.signature(optimizer).parameters
    first = [name for name, p in named.items() if p.kind == p.POSITIONAL_OR_KEYWORD and name != "grid"]
    assert first[1] == "lr"  # as with torch's
    assert not [p for p in named.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.annotation == p.empty]
    for defaults in DEFAULTS[optimizer]:
        assert {name: named[name].default for name in defaults} == defaults


@pytest.mark.parametrize("kind", ["Muon", "MuonW"])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.zeros(5), "has 1 dimension"),
        (torch.zeros(0, 4), "is empty"),
        (torch.zeros(3, 4, dtype=torch.float16), "holds no momentum"),
    ],
)
def test_a_parameter_that_comes_later_is_refused_as_one_at_construction(kind: str, other: Tensor, words: str) -> None:
    model, optimizer = start(kind)
    train(model, optimizer, 1)
    before = state_of(model)
    new = nn.Parameter(other)
    new.grad = torch.zeros_like(new)
    optimizer.param_groups[0]["params"].append(new)
    with pytest.raises(ValueError, match=words) as error:
        train(model, optimizer, 1)
    message(error)
    assert torch.equal(before, state_of(model))


def test_muonw_refuses_gradients_that_were_clipped_before_they_were_unscaled() -> None:
    model, optimizer = start("MuonW")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 0)).backward()
    before = state_of(model)
    optimizer.clip_grad_norm_(0.1)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="clipped before they were unscaled") as error:
        scaler.step(optimizer)
    message(error)
    assert torch.equal(before, state_of(model))


# ---- What a model goes through ----------------------------------------------------------------------------


@each
def test_a_graph_from_before_the_step_is_refused_as_torch_refuses_it(kind: str) -> None:
    for make in (torch.optim.AdamW, OURS[kind]):
        model = SmallNet()
        optimizer = make(model.parameters())
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@each_sharded
def test_a_step_uses_the_gradients_up(kind: str) -> None:
    model, optimizer = start(kind)
    loss_of(model, 0).backward()
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    before = state_of(model).clone()
    optimizer.step()
    assert torch.equal(state_of(model), before)


@each_sharded
def test_weights_loaded_into_a_bf16_model_after_construction_are_trained(kind: str) -> None:
    weights = {name: 0.3 * gaussian(*p.shape, seed=70).bfloat16() for name, p in SmallNet().state_dict().items()}
    ends = []
    for late in (True, False):
        model = SmallNet().bfloat16()
        if not late:
            model.load_state_dict(weights)
        optimizer = OURS[kind](model.parameters())
        if late:
            model.load_state_dict(weights)
        train(model, optimizer, 3)
        ends.append(state_of(model))
    assert torch.equal(*ends)


# ---- Storage that moves under the same tensor -------------------------------------------------------------


def sent(thing: Any) -> Any:
    """Return what another process would get of `thing`: the same memory, into which torch moves it for that."""
    return pickle.loads(ForkingPickler.dumps(thing))


HANDED_OVER: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "one parameter": lambda model, optimizer: [sent(next(model.parameters()))],
    "gradients": lambda model, optimizer: [sent(p.grad) for p in model.parameters() if p.grad is not None] and [],
    "the optimizer's state": lambda model, optimizer: sent(optimizer.state_dict()) and [],
    "share_memory": lambda model, optimizer: [p.detach() for p in model.share_memory().parameters()],
}


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moment", ["before", "between steps", "before a step"])
@pytest.mark.parametrize("what", HANDED_OVER)
def test_training_goes_on_after_something_was_handed_to_another_process(
    kind: str, what: str, moment: str, dtype: torch.dtype
) -> None:
    """And the other process sees it go on, as with torch's optimizers."""
    ends, seen = [], []
    for moves in (False, True):
        model = SmallNet().to(dtype)
        if moves and moment == "before":
            seen = HANDED_OVER[what](model, torch.optim.SGD(model.parameters()))
        optimizer = OURS[kind](model.parameters())
        train(model, optimizer, 2)
        if moves and moment == "between steps":
            seen = HANDED_OVER[what](model, optimizer)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        if moves and moment == "before a step":
            seen = HANDED_OVER[what](model, optimizer)
        optimizer.step()
        train(model, optimizer, 3, first=3)
        ends.append(state_of(model))
    assert torch.equal(*ends)
    for theirs, ours in zip(seen, model.parameters(), strict=False):
        assert torch.equal(theirs, ours)


@each
def test_what_another_process_writes_into_shared_memory_is_trained_on(kind: str) -> None:
    ends = []
    for shared in (False, True):
        model, optimizer = start(kind)
        theirs = sent(model) if shared else model
        train(model, optimizer, 1)
        with torch.no_grad():
            theirs.second.weight.mul_(2.0)
        train(model, optimizer, 2, first=1)
        ends.append(state_of(model))
    assert torch.equal(*ends)


@each_sharded
def test_a_narrow_parameter_has_a_wide_gradient_and_takes_one_of_either_dtype(kind: str) -> None:
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        model = SmallNet().bfloat16()
        optimizer = OURS[kind](model.parameters())
        for i in range(3):
            loss_of(model, i).backward()
            for p in model.parameters():
                assert p.grad is not None
                assert p.grad.dtype == torch.float32
                p.grad = (2 * p.grad.bfloat16()).to(dtype)
            optimizer.step()
        ends.append(state_of(model))
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], START.bfloat16())
