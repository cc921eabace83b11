"""QK-Clip in one process: what is recorded, which rows are scaled by what, and what it will not take."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from helpers_math import gaussian, message
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distmuon import AttentionHeads, DistributedMuon, Grid, MuonW, QKClip
from distmuon.extras.qk_clip import NonFiniteLogits, PlacedHeads, largest_logits
from distmuon.models.networks import ALONE, Block
from distmuon.sharding.collectives import Group
from distmuon.sharding.tensor_parallel import mark


class Layer(nn.Module):
    """Attention of 4 heads of width 3. key_heads: 0 for a fused projection."""

    def __init__(self, key_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.key_heads, rows = key_heads, 3 * (key_heads or 12)
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(8, 12 if key_heads else rows, bias), nn.Linear(8, rows, bias)
        if not key_heads:
            self.key = self.query

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (self.query(x), self.key(x)) if self.key_heads else self.query(x).split([12, 12, 12], -1)[:2]
        q, k = (t.unflatten(-1, (-1, 3)).transpose(1, 2) for t in (q, k))  # [batch, heads, length, 3]
        return q, k

    def heads(self) -> dict[str, AttentionHeads]:
        return {"layer": AttentionHeads(self.query, self.key, 4, self.key_heads or None)}


def still(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that moves nothing, so that only the clip does."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def logits_of(layer: Layer, x: Tensor) -> Tensor:  # [heads]
    return largest_logits(*layer(x))


# ---- The largest logit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_causal", "scale"), [(False, None), (True, 0.7)])
@pytest.mark.parametrize("chunk_numel", [1, 50, 2**24])
def test_it_is_the_maximum_of_the_logits_that_attention_uses(
    is_causal: bool, chunk_numel: int, scale: float | None
) -> None:
    q, k = gaussian(2, 4, 5, 3, seed=1).double(), gaussian(2, 2, 7, 3, seed=2).double()
    logits = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) * (scale or 3**-0.5)
    if is_causal:
        logits = logits.where(torch.ones(5, 7, dtype=torch.bool).tril(), -torch.inf)
    found = largest_logits(q, k, is_causal, scale, chunk_numel)
    assert torch.allclose(found, logits.amax((0, 2, 3)), rtol=1e-12)
    assert found.dtype == torch.float64


def test_a_nan_shows_in_its_head_alone_and_no_pair_gives_minus_infinity() -> None:
    q, k = gaussian(2, 4, 5, 3, seed=1), gaussian(2, 4, 5, 3, seed=2)
    q[1, 2, 3] = torch.nan
    assert largest_logits(q, k).isnan().tolist() == [False, False, True, False]
    assert largest_logits(q[:0], k[:0]).tolist() == [-math.inf] * 4


# ---- The scaling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key_heads", "bias"), [(4, True), (4, False), (2, True), (1, True), (0, True)])
def test_clipped_heads_end_at_the_threshold_and_the_others_stay_to_the_bit(key_heads: int, bias: bool) -> None:
    layer, x = Layer(key_heads, bias), gaussian(3, 6, 8, seed=3)
    optimizer, before = still(layer), logits_of(layer, x)
    tau = float(before.sort().values[1:3].mean())  # two heads of four pass it
    clip = QKClip(optimizer, layer.heads(), tau, alpha=0.3)
    weights = {n: p.detach().clone() for n, p in layer.named_parameters()}
    clip.record("layer", *layer(x))
    optimizer.step()
    over = before > tau
    assert over.tolist().count(True) == 2
    assert torch.allclose(logits_of(layer, x), before.clamp(max=tau), rtol=1e-5)
    assert torch.equal(logits_of(layer, x)[~over], before[~over])
    assert torch.equal(clip.largest["layer"], before)
    assert clip.summary() == {"largest logit": float(before.max()), "clipped heads": 2.0}
    gammas = [min(1.0, tau / value) for value in before.tolist()]
    for name, was in weights.items():
        share = 1.0 if key_heads in (1, 2) else 0.3
        parts = [[g**share for g in gammas], [g**0.7 for g in gammas] if key_heads in (0, 4) else [1.0] * key_heads]
        factors = parts["key" in name] if key_heads else [*parts[0], *parts[1], *[1.0] * 4]
        rows = torch.tensor(factors, dtype=torch.float64).repeat_interleave(3)
        expected = (was.double() * rows.view(-1, *[1] * (was.ndim - 1))).float()
        assert torch.equal(layer.get_parameter(name), expected)


def test_tp_cuts_every_part_of_a_fused_projection_by_itself() -> None:
    """Rank 1 of 2 holds the second half of the query's heads, of the key's, and of the value's."""
    fused: Any = nn.Linear(8, 3 * 12 // 2)  # TP-local, of 4 heads of width 3
    for p in (fused.weight, fused.bias):
        mark(p, 0)
    placed = PlacedHeads("layer", AttentionHeads(fused, fused, 4), Group("tp", 2, 1))
    q, k = gaussian(1, 2, 5, 3, seed=1), gaussian(1, 2, 5, 3, seed=2)
    assert placed.heads_of(q, k) == (2, 4)
    for held, rows in placed.factors([0.1, 0.2, 0.3, 0.4], 0.25):
        assert len(rows) == len(held)
        assert rows[::3].tolist() == pytest.approx([0.3**0.25, 0.4**0.25, 0.3**0.75, 0.4**0.75, 1.0, 1.0])
    with pytest.raises(ValueError, match="4 TP ranks, which cannot hold 4 heads and 2 key heads in equal parts"):
        PlacedHeads("layer", AttentionHeads(fused, fused, 4, 2), Group("tp", 4, 1))
    mark(fused.weight, 1)
    with pytest.raises(ValueError, match="cut over TP along its inputs"):
        PlacedHeads("layer", AttentionHeads(fused, fused, 4), Group("tp", 2, 1))


def test_master_weights_are_scaled_and_parameters_are_what_they_round_to() -> None:
    layer, x = Layer(4).bfloat16(), gaussian(3, 6, 8, seed=3).bfloat16()
    groups = [{"params": list(layer.named_parameters()), "algorithm": "adamw"}]
    optimizer = DistributedMuon(groups, Grid.alone(), lr=0.0, weight_decay=0.0)
    clip, master = QKClip(optimizer, layer.heads()), layer.query.weight.detach().float()
    for tau in (0.05, 0.031):  # the second time from masters that are no bfloat16
        clip.threshold = tau
        clip.record("layer", *layer(x))
        optimizer.step()
        assert (clip.gammas["layer"] < 1).any()
        roots = torch.tensor([gamma**0.5 for gamma in clip.gammas["layer"].tolist()], dtype=torch.float64)
        master = (master.double() * roots.repeat_interleave(3).view(-1, 1)).float()
        assert torch.equal(optimizer.state[layer.query.weight]["master_weight"], master.flatten())
        assert torch.equal(layer.query.weight, master.bfloat16())


def test_a_backward_pass_through_weights_from_before_is_refused() -> None:
    layer = Layer(4)
    optimizer = DistributedMuon([{"params": list(layer.query.parameters()), "algorithm": "adamw"}], Grid.alone())
    q, _ = layer(gaussian(3, 6, 8, seed=3).requires_grad_())
    optimizer.scale_rows_({layer.query.weight: torch.full((12,), 0.5)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


# ---- What counts ------------------------------------------------------------------------------------------


def test_micro_batches_count_together_evaluation_not_at_all_and_a_step_uses_them_up() -> None:
    layer, x, other = Layer(4), gaussian(3, 6, 8, seed=3), 2 * gaussian(3, 6, 8, seed=4)
    optimizer = still(layer)
    clip = QKClip(optimizer, layer.heads(), math.inf)
    for batch in (x, other):
        clip.record("layer", *layer(batch))
    with torch.no_grad():
        clip.record("layer", *layer(9 * x))
    optimizer.step()
    assert torch.equal(clip.largest["layer"], torch.maximum(logits_of(layer, x), logits_of(layer, other)))
    clip.record("layer", *layer(9 * x))
    clip.forget()
    clip.record("layer", *layer(x))
    optimizer.step()
    assert torch.equal(clip.largest["layer"], logits_of(layer, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_and_compiled_models_are_recorded(reentrant: bool) -> None:
    block = Block(12, 4, ALONE, "block")
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(gaussian(*p.shape, seed=p.numel()) / 4)
    optimizer, x = still(block), gaussian(2, 6, 12, seed=1).requires_grad_()
    clip = QKClip(optimizer, {"block": AttentionHeads(block.query, block.key, 4)})
    block.watch = clip.recorder("block", is_causal=True)
    seen = []
    for model in (block, torch.compile(block, backend="eager", fullgraph=True), None):
        out = model(x) if model is not None else checkpoint(block, x, use_reentrant=reentrant)
        out.sum().backward()
        optimizer.step()
        seen.append(clip.largest["block"])
    assert (seen[0] > 0).all()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_a_copied_or_pickled_model_is_not_watched() -> None:
    block = Block(12, 4, ALONE, "block")
    clip = QKClip(still(block), {"block": AttentionHeads(block.query, block.key, 4)})
    block.watch = clip.recorder("block")
    assert copy.deepcopy(block).watch is None
    assert pickle.loads(pickle.dumps(block)).watch is None


def test_a_layer_that_is_never_recorded_is_warned_of_once() -> None:
    layer = Layer(4)
    optimizer = still(layer)
    clip = QKClip(optimizer, layer.heads(), 0.01)
    was = layer.query.weight.detach().clone()
    with pytest.warns(UserWarning, match="no logits of 'layer' were recorded before this step"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert torch.equal(layer.query.weight, was)
    assert clip.summary() == {"largest logit": -math.inf, "clipped heads": 0.0}


def test_logits_that_are_not_finite_stop_the_training_before_a_weight_is_scaled() -> None:
    layer = Layer(4)
    optimizer, was = still(layer), layer.query.weight.detach().clone()
    clip = QKClip(optimizer, layer.heads(), 0.01)
    for value in (torch.inf, torch.nan):
        x = gaussian(3, 6, 8, seed=3)
        x[1, 2] = value
        clip.record("layer", *layer(x))
        with pytest.raises(NonFiniteLogits, match=r"the logits of 'layer', head 0, are not finite") as error:
            optimizer.step()
        message(error)
    assert torch.equal(layer.query.weight, was)
    clip.record("layer", *layer(gaussian(3, 6, 8, seed=3)))
    optimizer.step()
    assert not torch.equal(layer.query.weight, was)


def test_a_grad_scalers_skip_scales_nothing() -> None:
    """MuonW skips in its own step. torch's SGD is not even called, so what it recorded is to be forgotten."""
    for kind, options in ((MuonW, {"algorithm": "adamw"}), (torch.optim.SGD, {})):
        layer, scaler = Layer(4), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer: Any = kind([{"params": list(layer.parameters()), **options}], lr=0.0, weight_decay=0.0)
        clip, was = QKClip(optimizer, layer.heads(), 0.01), layer.query.weight.detach().clone()
        for factor, stays in ((torch.inf, True), (1.0, False)):
            q, k = layer(gaussian(3, 6, 8, seed=3))
            clip.record("layer", q * factor, k)
            scaler.scale((q * factor).sum() + k.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if kind is torch.optim.SGD and stays:
                clip.forget()
            assert torch.equal(layer.query.weight, was) == stays
        assert clip.skipped_steps == (kind is MuonW)


# ---- What is refused --------------------------------------------------------------------------------------


def test_what_it_cannot_take_is_refused_in_a_sentence() -> None:
    layer = Layer(4)
    odd, norm, low_rank = nn.Linear(8, 10), nn.LayerNorm(12), nn.Linear(8, 12)
    low_rank.register_parameter("weight_a", nn.Parameter(torch.zeros(2)))
    matrix: Any = layer.key.weight
    model = nn.ModuleList([layer, odd, norm, low_rank])
    optimizer, one = still(model), layer.heads()["layer"]
    for arguments, words in (
        ({"attentions": {}}, "there is no layer to clip"),
        ({"attentions": {"a": layer}}, "attentions holds a Layer; give {name: AttentionHeads"),
        ({"attentions": None}, "attentions holds a NoneType; give {name: AttentionHeads"),
        ({"threshold": None}, "threshold is None; give a number"),
        ({"alpha": "0.5"}, "alpha is '0.5'; give a number"),
        ({"threshold": 0.0}, "threshold is 0.0"),
        ({"threshold": math.nan}, "threshold is nan"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"attentions": {"a": one._replace(heads=0)}}, "heads=0"),
        ({"attentions": {"a": one._replace(key_heads=0)}}, "key_heads=0"),
        ({"attentions": {"a": one._replace(key_heads=3)}}, "give a number that divides 4"),
        ({"attentions": {"a": one._replace(query=odd)}}, "the weight of the query of 'a' has 10 rows"),
        ({"attentions": {"a": one._replace(query=norm)}}, r"weight \[12\], bias \[12\]"),
        ({"attentions": {"a": one._replace(query=low_rank)}}, r"weight_a \[2\]"),
        ({"attentions": {"a": one._replace(key=matrix)}}, "the key of 'a' has no parameters"),
        ({"attentions": {"a": one._replace(key=nn.Linear(8, 12))}}, "the key of 'a' is no parameter of the optimizer"),
        ({"attentions": {"a": one, "b": one}}, "the query of 'b' is the query of 'a', too"),
    ):
        with pytest.raises((TypeError, ValueError), match=words) as error:
            QKClip(optimizer, **({"attentions": {"a": one}} | arguments))
        message(error)
    with pytest.raises(TypeError, match="optimizer is None; give the one that trains the weights"):
        QKClip(None, {"a": one})  # type: ignore[arg-type]
    clip = QKClip(optimizer, {"a": one})
    q, k = layer(gaussian(3, 6, 8, seed=3))
    for name, tensors, words in (
        ("b", (q, k), "knows no layer 'b'; it has 'a'"),
        ("a", (q.transpose(1, 2), k), r"expected \[batch, 4, length, 3\]"),
        ("a", (q[0], k[0]), r"\[4, 6, 3\]"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            clip.record(name, *tensors)
        message(error)
    with pytest.raises(ValueError, match="knows no layer 'c'"):
        clip.recorder("c")
    with pytest.raises(TypeError, match="queries or keys of 'a' are no tensors"):
        clip.record("a", None, k)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scale is '1'; give a number"):
        clip.record("a", q, k, scale="1")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("threshold", -1.0), ("threshold", None), ("alpha", math.nan)])
def test_an_option_that_is_set_wrong_later_scales_nothing(name: str, value: Any) -> None:
    layer = Layer(4)
    optimizer = still(layer)
    clip, was = QKClip(optimizer, layer.heads(), 0.01), layer.query.weight.detach().clone()
    setattr(clip, name, value)
    clip.record("layer", *layer(gaussian(3, 6, 8, seed=3)))
    with pytest.raises((TypeError, ValueError), match=f"{name} is {value!r}") as error:
        optimizer.step()
    message(error)
    assert torch.equal(layer.query.weight, was)
