"""The MLP and the transformer: the same function on any TP group, replicas identical to the bit, traffic foretold."""

from typing import Any

import model_workers as work
import pytest
import torch
from helpers_math import message
from model_workers import MODELS
from once import once
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon import launch
from distmuon.models.networks import ALONE, MLP, Transformer, initial_weights
from distmuon.sharding.collectives import Group
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import ColumnParallelLinear, RowParallelLinear

every_model = pytest.mark.parametrize("name", MODELS)
TP, GRIDS = 4, [(1, 4), (2, 2)]


@once
def facts(tp: int, dp: int = 1) -> list[dict[str, Any]]:
    """Return what each rank of one world has found out; the world runs once, when the first test asks."""
    return launch.run(work.model_facts, dp=dp, tp=tp)


def close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-11, atol=1e-13)


# ---- The same function on any TP group --------------------------------------------------------------------


@every_model
def test_logits_and_loss_do_not_depend_on_the_tp_group(name: str) -> None:
    expected = facts(1)[0][name]
    for ranks_facts in facts(TP):
        found = ranks_facts[name]
        assert close(found["logits"], expected["logits"])
        assert close(found["loss"], expected["loss"])
        assert torch.equal(found["logits"], facts(TP)[0][name]["logits"])


@every_model
def test_every_gradient_is_a_slice_of_the_whole_one(name: str) -> None:
    expected = facts(1)[0][name]["parameters"]
    for rank, ranks_facts in enumerate(facts(TP)):
        found = ranks_facts[name]["parameters"]
        assert found.keys() == expected.keys()
        for key, (dim, gradient) in found.items():
            whole = expected[key][1]
            assert whole.abs().max() > 1e-6, key
            assert close(gradient, whole if dim is None else whole.chunk(TP, dim)[rank]), key
        assert any(dim is not None for dim, _ in found.values())


def test_the_mlp_is_linear_layers_with_relu_between() -> None:
    x, _ = work.batch("mlp")
    mlp = work.start("mlp", ALONE, torch.float64)
    y, weights = x, mlp.state_dict()
    for i in range(5):
        y = F.relu(F.linear(y, weights[f"layers.{i}.weight"], weights[f"layers.{i}.bias"]))
    assert close(mlp(x), F.linear(y, weights["head.weight"], weights["head.bias"]))


def test_a_block_is_torchs_own_encoder_layer_with_a_causal_mask() -> None:
    block = work.start("transformer", ALONE, torch.float64).blocks[0]
    weights = block.state_dict()
    oracle = nn.TransformerEncoderLayer(16, 4, 64, 0.0, F.gelu, batch_first=True, norm_first=True).double()
    theirs = {name: torch.zeros_like(value) for name, value in oracle.state_dict().items()}  # for biases, which stay
    theirs |= {name: weights[name] for name in theirs if name.startswith("norm")}
    theirs["self_attn.in_proj_weight"] = torch.cat([weights[f"{name}.weight"] for name in ("query", "key", "value")])
    for name, ours in (("self_attn.out_proj", "out"), ("linear1", "up"), ("linear2", "down")):
        theirs[f"{name}.weight"] = weights[f"{ours}.weight"]
    oracle.load_state_dict(theirs)
    x = work.synthetic(3, work.CONTEXT, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(work.CONTEXT, dtype=torch.float64)
    assert torch.allclose(block(x), oracle(x, src_mask=mask, is_causal=True), rtol=1e-10, atol=1e-12)


# ---- Replicas ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp"), GRIDS)
@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_replicated_stays_identical_to_the_bit_while_training(
    dp: int, tp: int, name: str, dtype: torch.dtype
) -> None:
    trained = [found["trained"][name, str(dtype)] for found in facts(tp, dp)]
    first = trained[0]
    assert set(first["moved"]) == set(first["after"])  # everything, so that there is something to drift apart
    for rank, found in enumerate(trained):
        for key, value in found["after"].items():
            other = trained[rank % tp] if key in first["split"] else first  # split: replicated over DP alone
            assert torch.equal(value, other["after"][key]), (rank, key)
        assert found["losses"] == trained[rank - rank % tp]["losses"]
    assert len(first["split"]) < len(first["after"])


# ---- Traffic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, TP])
@every_model
def test_activations_send_what_was_predicted_and_an_independent_count_agrees(tp: int, name: str) -> None:
    for ranks_facts in facts(tp):
        found = ranks_facts[name]
        assert found["differences"] == []
        assert found["predicted"] == found["counted"]
        assert bool(found["counted"]) == (tp > 1)


def test_a_prediction_needs_no_process_and_no_memory() -> None:
    ledger = Ledger()
    with torch.device("meta"):
        model = Transformer(50_000, 4096, layers=3, heads=32, context=8192, tp=Group("tp", 8))
    model.predict_activations(ledger, rows=1000, item_bytes=2, tp=8)
    total = ledger.total(op="all_reduce", group="tp")
    assert (total.calls, total.payload_bytes) == (3 * 4, 3 * 4 * 1000 * 4096 * 2)
    assert ledger.total() == total


# ---- Building ---------------------------------------------------------------------------------------------


def test_mlp_layers_are_cut_in_pairs_and_an_odd_one_is_whole() -> None:
    kinds = [type(layer) for layer in MLP((6, 8, 12, 8, 12, 8, 3), Group("tp", 2)).layers]
    assert kinds == [ColumnParallelLinear, RowParallelLinear, ColumnParallelLinear, RowParallelLinear, nn.Linear]
    assert type(MLP((6, 8, 12, 3)).head) is nn.Linear


@pytest.mark.parametrize(
    ("words", "build"),
    [
        ("blocks.0: 3 heads cannot be split evenly over 2 TP", lambda: Transformer(9, 12, 1, 3, 4, Group("tp", 2))),
        ("layers.0: 9 outputs cannot be split evenly over 2 TP", lambda: MLP((4, 9, 8, 3), Group("tp", 2))),
        ("layers.2: 6 outputs cannot be split evenly over 4 TP", lambda: MLP((4, 8, 8, 6, 8, 3), Group("tp", 4))),
    ],
)
def test_what_t_does_not_divide_is_refused_by_name(words: str, build: Any) -> None:
    with pytest.raises(ValueError, match=words) as error:
        build()
    message(error)


@every_model
def test_initial_weights_depend_on_the_seed_and_on_nothing_else(name: str) -> None:
    model, another = MODELS[name](ALONE), MODELS[name](ALONE).bfloat16()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again, other = initial_weights(model, 5), initial_weights(another, 5), initial_weights(model, 6)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.keys() == dict(model.named_parameters()).keys()
    for key, value in first.items():
        assert value.dtype == torch.float64
        assert value.shape == model.get_parameter(key).shape
        assert torch.equal(value, again[key])
        assert torch.equal(value, other[key]) == (value.ndim == 1)


def test_initial_weights_have_the_stated_scales() -> None:
    weights = initial_weights(Transformer(500, 64, 1, 4, 100), seed=0)
    assert float(weights["tokens.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(weights["blocks.0.down.weight"].std()) == pytest.approx(256**-0.5, rel=0.05)
    assert float(weights["head.weight"].std()) == pytest.approx(64**-0.5, rel=0.05)
    assert torch.equal(weights["norm.weight"], torch.ones(64, dtype=torch.float64))
    assert not weights["norm.bias"].any()
    assert not initial_weights(MLP((4, 8, 8, 3)), seed=0)["layers.0.bias"].any()
