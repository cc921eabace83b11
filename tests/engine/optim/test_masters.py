"""Weights narrower than float32: rounded once in a step, and float32 masters where they are wanted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_math import gaussian, message
from torch import nn

from distmuon import DistributedMuon, Grid, Metrics, Muon, MuonW, QKClip, checkpoint
from distmuon.extras.qk_clip import AttentionHeads
from distmuon.optim.adamw import adamw_
from distmuon.optim.masters import MasterWeights
from distmuon.optim.muon import apply_, decay_, momentum_, orthogonalize, scale
from distmuon.optim.options import MUON_DEFAULTS
from distmuon.verify.blocks import BlockMuon
from muon_conformance.programs import SmallNet, train

NARROW = torch.bfloat16
Named = list[tuple[str, nn.Parameter]]
KINDS: dict[str, Callable[..., MasterWeights]] = {
    "Muon": lambda named, **options: Muon(named, **options),
    "BlockMuon": lambda named, **options: BlockMuon(named, **options),
    "MuonW": lambda named, **options: MuonW(named, **options),
    "MuonW's AdamW": lambda named, **options: MuonW([{"params": named, "algorithm": "adamw"}], **options),
}
each = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.filterwarnings("error", "ignore:torch.distributed is disabled")


def matrix(dtype: torch.dtype = NARROW, size: float = 1.0) -> nn.Parameter:
    return nn.Parameter((size * gaussian(24, 16)).to(dtype))


def drift(p: nn.Parameter, optimizer: torch.optim.Optimizer, steps: int, size: float = 1.0) -> nn.Parameter:
    """Take steps along gradients of noise, rounded to bf16; of size 0, decay alone."""
    for step in range(steps):
        p.grad = (size * gaussian(*p.shape, seed=1 + step)).to(NARROW).to(p.dtype)
        optimizer.step()
    return p


def quiet(kind: str, named: Named, **options: Any) -> MasterWeights:
    return KINDS[kind](named, **{"master_weights": False} | options)


# ---- One rounding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Muon", "BlockMuon", "MuonW"])
def test_decay_and_update_of_a_narrow_matrix_are_rounded_together(kind: str) -> None:
    p, group = matrix(), MUON_DEFAULTS | {"lr": 0.01}
    wide, gradient = p.detach().float(), gaussian(24, 16, seed=1).to(NARROW)
    (update,) = orthogonalize(momentum_([torch.zeros_like(p)], [gradient], 0.95), group)
    decay_([wide], 0.01, 0.1)
    apply_([wide], [update], 0.01, scale((24, 16)))
    drift(p, quiet(kind, [("p", p)], lr=0.01), 1)
    assert torch.equal(p, wide.to(NARROW))


def test_a_narrow_step_of_adamw_is_rounded_once() -> None:
    p, gradients = matrix(), [gaussian(24, 16, seed=1 + step).to(NARROW) for step in range(3)]
    mean, square, wide = torch.zeros_like(p), torch.zeros_like(p), p.detach().clone()
    group = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for number, gradient in enumerate(gradients):  # what is kept between two steps is narrow
        kept = {"step": torch.tensor(float(number)), "exp_avg": mean.float(), "exp_avg_sq": square.float()}
        weight = wide.float()
        adamw_(group, [weight], [gradient.float()], [kept])
        wide, mean, square = weight.to(NARROW), kept["exp_avg"].to(NARROW), kept["exp_avg_sq"].to(NARROW)
    drift(p, quiet("MuonW's AdamW", [("p", p)], lr=0.01), 3)
    assert torch.equal(p, wide)


# ---- Masters ----------------------------------------------------------------------------------------------


@each
def test_with_masters_all_that_is_kept_is_float32_and_steps_are_those_of_float32(kind: str) -> None:
    """So a bf16 model ends where a float32 model ends that is fed the same gradients."""
    narrow, wide = matrix(), matrix(torch.float32)
    wide.data.copy_(narrow.data)
    optimizer = KINDS[kind]([("p", narrow)], lr=1e-3, master_weights=True)
    drift(narrow, optimizer, 10)
    drift(wide, KINDS[kind]([("p", wide)], lr=1e-3), 10)
    assert torch.equal(narrow, wide.to(NARROW))
    assert torch.equal(optimizer.state[narrow]["master_weight"], wide)
    assert {value.dtype for value in optimizer.state[narrow].values()} == {torch.float32}


def test_with_masters_it_is_the_bf16_distributed_muon_to_the_bit() -> None:
    ends = []
    for make in (
        lambda groups, **options: MuonW(groups, master_weights=True, **options),
        lambda groups, **options: DistributedMuon(groups, Grid.alone(), **options),
    ):
        model = SmallNet().to(NARROW)
        groups = [{"params": [("a", model.first.weight)]}, {"params": [("b", model.second.weight)],
                                                            "algorithm": "adamw"}]  # fmt: skip
        train(model, make(groups, lr=1e-3, batched=False), 5)
        ends.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@each
def test_what_is_written_to_a_parameter_counts_and_the_rest_keeps_its_digits(kind: str) -> None:
    p = matrix()
    optimizer = KINDS[kind]([("p", p)], lr=1e-4, master_weights=True)
    drift(p, optimizer, 5)
    before = optimizer.state[p]["master_weight"].clone()
    p.data[1] = 3.0
    now = optimizer.master(p)
    assert now is not None
    assert torch.equal(now[1], torch.full((16,), 3.0))
    assert torch.equal(now[2:], before[2:])
    assert not torch.equal(now[2:], p.detach()[2:].float())
    drift(p, optimizer, 1)
    assert ((p[1] - 3).abs() < 0.1).all()


@each
def test_a_float32_parameter_is_its_own_master(kind: str) -> None:
    ends = []
    for wanted in (True, None):
        p = matrix(torch.float32)
        optimizer = KINDS[kind]([("p", p)], lr=0.02, master_weights=wanted)
        ends.append(drift(p, optimizer, 3))
        assert "master_weight" not in optimizer.state[p]
    assert torch.equal(*ends)


# ---- Saved, loaded, copied --------------------------------------------------------------------------------


def hand_over(
    way: str, folder: Path, net: nn.Module, saver: MasterWeights, twin: nn.Module, theirs: MasterWeights
) -> None:
    """Load into `twin` and its optimizer what `net` and its own save: a file of states, or a checkpoint's folder."""
    if way == "folder":
        checkpoint.save(folder / "at", net, saver)
        checkpoint.load(folder / "at", twin, theirs)
        return
    torch.save((net.state_dict(), saver.state_dict()), folder / "states")
    of_model, of_optimizer = torch.load(folder / "states", weights_only=True)
    theirs.load_state_dict(of_optimizer)
    twin.load_state_dict(of_model)


@each
@pytest.mark.parametrize("way", ["state", "deepcopy", "folder"])
def test_masters_go_along_when_training_goes_on_elsewhere(kind: str, way: str, tmp_path: Path) -> None:
    net = nn.ParameterDict({"p": matrix()})
    optimizer = KINDS[kind](list(net.named_parameters()), lr=1e-4, master_weights=True)
    drift(net["p"], optimizer, 5)
    if way == "deepcopy":
        twin, theirs = copy.deepcopy((net, optimizer))
        assert theirs.master_weights
    else:
        twin = nn.ParameterDict({"p": matrix()})
        theirs = KINDS[kind](list(twin.named_parameters()), master_weights=True)
        hand_over(way, tmp_path, net, optimizer, twin, theirs)
    assert torch.equal(theirs.state[twin["p"]]["master_weight"], optimizer.state[net["p"]]["master_weight"])
    assert not torch.equal(theirs.state[twin["p"]]["master_weight"], net["p"].float())
    drift(net["p"], optimizer, 3)
    drift(twin["p"], theirs, 3)
    assert torch.equal(net["p"], twin["p"])
    assert torch.equal(theirs.state[twin["p"]]["master_weight"], optimizer.state[net["p"]]["master_weight"])


@each
@pytest.mark.parametrize("way", ["state", "folder"])
def test_a_state_without_masters_is_taken_and_said(kind: str, way: str, tmp_path: Path) -> None:
    net, twin = (nn.ParameterDict({"p": matrix()}) for _ in range(2))
    saver = quiet(kind, list(net.named_parameters()), lr=1e-2)
    drift(net["p"], saver, 3)
    theirs = KINDS[kind](list(twin.named_parameters()), lr=1e-2, master_weights=True)
    drift(twin["p"], theirs, 1)  # so that there are masters, of another training
    words = {"state": "has no master_weight of 'p'; the masters begin", "folder": "keeps no master weights, so they"}
    with pytest.warns(UserWarning, match=words[way]):
        hand_over(way, tmp_path, net, saver, twin, theirs)
    assert {value.dtype for value in theirs.state[twin["p"]].values()} == {torch.float32}
    masters = theirs.master(twin["p"])
    assert masters is not None
    assert torch.equal(masters, net["p"].float())
    drift(twin["p"], theirs, 2)


@each
@pytest.mark.parametrize("way", ["state", "folder"])
def test_masters_are_not_dropped_by_an_optimizer_that_keeps_none(kind: str, way: str, tmp_path: Path) -> None:
    net, twin = (nn.ParameterDict({"p": matrix()}) for _ in range(2))
    saver = KINDS[kind](list(net.named_parameters()), lr=1e-2, master_weights=True)
    drift(net["p"], saver, 3)
    theirs = quiet(kind, list(twin.named_parameters()))
    drift(twin["p"], theirs, 1)
    before = copy.deepcopy((theirs.state_dict(), twin["p"].detach()))
    words = {"state": "has a master_weight for 'p'.*master_weights=True", "folder": "float32 master weights of 'p'"}
    with pytest.raises(ValueError, match=words[way]) as error:
        hand_over(way, tmp_path, net, saver, twin, theirs)
    message(error)
    now = theirs.state_dict(), twin["p"].detach()
    assert torch.equal(now[1], before[1])
    assert now[0]["param_groups"] == before[0]["param_groups"]
    assert all(torch.equal(now[0]["state"][0][key], value) for key, value in before[0]["state"][0].items())


# ---- Those who look, and clip -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Muon", "MuonW"])
def test_the_update_is_measured_at_the_masters(kind: str) -> None:
    p = matrix()
    optimizer = KINDS[kind]([("p", p)], lr=1e-4, master_weights=True)
    metrics = Metrics(optimizer, every=1)
    for _ in range(2):
        drift(p, optimizer, 1)
        assert metrics.latest["totals"]["update_rms"] == pytest.approx(0.2, rel=0.1)
        assert metrics.latest["samples"]["p"]["cosine"] > 0.95


@pytest.mark.parametrize("kind", ["Muon", "MuonW"])
def test_qk_clip_scales_the_masters_too(kind: str) -> None:
    layer = nn.Module()
    layer.query, layer.key = (nn.Linear(8, 8, bias=False).to(NARROW) for _ in range(2))
    optimizer = KINDS[kind](list(layer.named_parameters()), lr=0.0, master_weights=True)
    clip = QKClip(optimizer, {"layer": AttentionHeads(layer.query, layer.key, 4)}, threshold=0.01)
    q, k = (gaussian(1, 4, 6, 2, seed=seed) for seed in (1, 2))
    clip.record("layer", q, k)
    before = {p: p.detach().float() for p in layer.parameters()}
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    roots = (clip.gammas["layer"] ** 0.5).repeat_interleave(2).view(-1, 1)
    for p, was in before.items():
        assert torch.equal(optimizer.state[p]["master_weight"], (was.double() * roots).float())
        assert torch.equal(p, optimizer.state[p]["master_weight"].to(NARROW))


# ---- Said -------------------------------------------------------------------------------------------------


@each
def test_decay_that_is_rounded_away_is_warned_of_once_with_the_remedy(kind: str) -> None:
    p = matrix()
    optimizer = KINDS[kind]([("p", p)], lr=0.0)
    drift(p, optimizer, 1)  # nothing is lost of nothing, as in a warm-up
    optimizer.param_groups[0]["lr"] = 0.02
    words = r"'p' is torch.bfloat16, in which a decay of lr \* weight_decay = 2.0e-03 .*pass master_weights=True"
    with pytest.warns(UserWarning, match=words) as told:
        drift(p, optimizer, 3)
    assert len(told) == 1
    assert Path(told[0].filename).name == "test_masters.py"  # where the user's own line is


@each
def test_nothing_is_said_where_nothing_is_lost_or_it_is_wanted(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype, options in (
            (torch.float32, {}),
            (NARROW, {"master_weights": True}),
            (NARROW, {"master_weights": False}),
            (NARROW, {"weight_decay": 0.0}),
            (NARROW, {"weight_decay": 2.0}),
        ):
            p = matrix(dtype)
            drift(p, KINDS[kind]([("p", p)], lr=0.01, **options), 2)


@each
def test_a_choice_that_does_not_exist_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="master_weights is 'yes'; give True") as error:
        KINDS[kind]([("p", matrix())], master_weights="yes")
    message(error)
