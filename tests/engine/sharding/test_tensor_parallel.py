"""Tensor-parallel layers: outputs and gradients of nn.Linear on whole weights, two all-reduces per pair."""

from typing import Any

import model_workers as work
import pytest
import torch
from helpers_math import message
from model_workers import BATCH, INPUTS, OUTPUTS, synthetic
from once import once
from torch import Tensor, nn

from distmuon import launch
from distmuon.sharding.collectives import Group
from distmuon.sharding.ledger import Traffic, ring_bytes
from distmuon.sharding.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mark, tp_split_dim

on_every_group = pytest.mark.parametrize("tp", [1, 4])


@once
def facts(tp: int) -> list[dict[str, Any]]:
    """Return what each rank of one TP group has found out; the world runs once, when the first test asks."""
    return launch.run(work.layer_facts, tp=tp)


def close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-13, atol=1e-13)


def on_whole_weights(bias: bool, inputs: int, outputs: int) -> dict[str, Any]:
    """Return output and gradients of nn.Linear."""
    layer = nn.Linear(inputs, outputs, bias).double()
    layer.load_state_dict(work.whole_linear(bias, inputs, outputs))
    x = synthetic(*BATCH, inputs).requires_grad_()
    y = layer(x)
    y.backward(synthetic(*BATCH, outputs, seed=9))
    return {"y": y.detach(), "x": x.grad, "parameters": {name: p.grad for name, p in layer.named_parameters()}}


def cut(whole: Tensor, dim: int | None, tp: int, rank: int) -> Tensor:
    return whole if dim is None else whole.chunk(tp, dim)[rank]


@on_every_group
@pytest.mark.parametrize("bias", [True, False])
def test_a_column_parallel_layer_is_a_slice_of_the_whole_layer(tp: int, bias: bool) -> None:
    expected = on_whole_weights(bias, INPUTS, OUTPUTS)
    for rank, ranks_facts in enumerate(facts(tp)):
        found = ranks_facts["column"][bias]
        assert close(found["y"], cut(expected["y"], -1, tp, rank))
        assert close(found["x"], expected["x"])
        assert [dim for dim, _ in found["parameters"].values()] == [0, 0][: 1 + bias]
        for name, (dim, gradient) in found["parameters"].items():
            assert close(gradient, cut(expected["parameters"][name], dim, tp, rank)), name


@on_every_group
@pytest.mark.parametrize("bias", [True, False])
def test_a_row_parallel_layer_sums_to_the_whole_layer_and_adds_its_bias_once(tp: int, bias: bool) -> None:
    expected = on_whole_weights(bias, OUTPUTS, INPUTS)
    for rank, ranks_facts in enumerate(facts(tp)):
        found = ranks_facts["row"][bias]
        assert close(found["y"], expected["y"])
        assert close(found["x"], cut(expected["x"], -1, tp, rank))
        assert [dim for dim, _ in found["parameters"].values()] == [1, None][: 1 + bias]
        for name, (dim, gradient) in found["parameters"].items():
            assert close(gradient, cut(expected["parameters"][name], dim, tp, rank)), name
        assert torch.equal(found["y"], facts(tp)[0]["row"][bias]["y"])  # the same bits on every rank


@on_every_group
def test_what_is_summed_over_tp_is_a_copy_and_layers_that_share_one_sum_its_gradient_once(tp: int) -> None:
    x = synthetic(*BATCH, INPUTS).requires_grad_()
    first, second = (work.whole_linear(False, seed=10 * seed)["weight"] for seed in range(2))
    ((x @ first.mT).square().sum() + (x @ second.mT).square().sum()).backward()
    assert x.grad is not None
    for found in facts(tp):
        assert torch.allclose(found["shared copy"]["x"], x.grad, rtol=1e-12, atol=1e-12)
        assert found["shared copy"]["collectives"] == (1 if tp > 1 else 0)
        for name, (before, after) in found["inputs after"].items():
            assert torch.equal(before, after), name


@on_every_group
def test_a_pair_needs_one_all_reduce_in_each_direction(tp: int) -> None:
    payload = BATCH[0] * BATCH[1] * INPUTS * 8
    once = Traffic(1, payload, ring_bytes("all_reduce", payload, tp))
    for found in facts(tp):
        assert found["pair"]["forward"] == ["down"][: tp - 1]
        assert found["pair"]["all"] == ({"down": once, "up": once} if tp > 1 else {})
        assert found["pair"]["counted"]


@on_every_group
def test_slicing_whole_parameters_and_gathering_the_slices_are_inverse(tp: int) -> None:
    shapes = {"column.weight": (OUTPUTS // tp, INPUTS), "row.weight": (INPUTS, OUTPUTS // tp), "row.bias": (INPUTS,)}
    for ranks_facts in facts(tp):
        found = ranks_facts["slices"]
        assert {name: tuple(found["local"][name].shape) for name in shapes} == shapes
        for name, full in found["full"].items():
            assert torch.equal(found["whole"][name], full), name
            assert torch.equal(found["whole later"][name], full), name  # a copy, not a view of the model
            assert torch.equal(found["again"][name], found["local"][name]), name


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ColumnParallelLinear, "up: 10 outputs cannot be split evenly over 4 TP ranks"),
        (RowParallelLinear, "up: 6 inputs cannot be split evenly over 4 TP ranks"),
    ],
)
def test_a_dimension_that_t_does_not_divide_is_refused_by_name(kind: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        kind(6, 10, Group("tp", 4), name="up")
    message(error)


def test_a_mark_is_read_back_and_an_unmarked_parameter_is_replicated() -> None:
    assert tp_split_dim(mark(nn.Parameter(torch.ones(2, 2)), 1)) == 1
    assert tp_split_dim(mark(nn.Parameter(torch.ones(2, 2)), None)) is None
    assert tp_split_dim(nn.Parameter(torch.ones(2, 2))) is None


@pytest.mark.parametrize("dim", [-1, 2])
def test_a_mark_outside_the_dimensions_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"tp_split_dim is {dim}, .*dimensions 0 to 1.*None"):
        mark(nn.Parameter(torch.ones(2, 3)), dim)
