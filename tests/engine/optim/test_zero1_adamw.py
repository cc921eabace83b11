"""ZeRO-1: reductions in rank order, AdamW's own bits on shards, fp32 masters, and gradients on their way there."""

import functools
from collections.abc import Callable
from typing import Any

import optimizer_cases as cases
import optimizer_workers as work
import pytest
import torch
from helpers_math import Operations, gaussian, message
from once import once
from optimizer_cases import ADAMW_ONLY, SINGLE_SCALAR
from optimizer_workers import same
from torch import Tensor, nn

from distmuon import launch
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.buffers import ShardedBuffers, dtype_name, specs_of
from distmuon.sharding.grid import Grid

on_every_grid = pytest.mark.parametrize(("dp", "tp"), [(4, 1), (3, 1), (2, 2)])
CASES = {
    "fp32": ADAMW_ONLY,
    "fp64": ADAMW_ONLY.of_dtype(torch.float64),
    "bf16": ADAMW_ONLY.of_dtype(torch.bfloat16),
    "one scalar": SINGLE_SCALAR,
}


@once
def facts(dp: int, tp: int) -> list[dict[str, Any]]:
    """Return what each rank of one world has found out; the world runs once, when the first test asks."""
    return launch.run(work.zero1_facts, dp=dp, tp=tp)


def optimizer(*named: tuple[str, Tensor], **options: Any) -> Zero1AdamW:
    return Zero1AdamW(list(named), Grid.alone(), **options)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(gaussian(*shape, dtype=dtype))


def same_place(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype


# ---- On real worlds ---------------------------------------------------------------------------------------


@on_every_grid
def test_a_shards_gradient_is_the_mean_in_rank_order_to_the_bit(dp: int, tp: int) -> None:
    weights = {w.name: w for w in ADAMW_ONLY.weights}
    covered = {(name, t): torch.zeros(w.shape).flatten() for name, w in weights.items() for t in range(tp)}
    forwards, backwards = [], []
    for rank, found in enumerate(facts(dp, tp)):
        for name, (place, gradient) in found["reduced"].items():
            w = weights[name]
            copies = [cases.whole_gradient(ADAMW_ONLY, w, tp, 0, r) for r in range(dp)]
            mine = [cases.cut(whole, w.dim, tp, rank % tp).flatten()[place] for whole in copies if whole is not None]
            forwards.append(torch.equal(gradient, functools.reduce(torch.add, mine) / dp))
            backwards.append(torch.equal(gradient, functools.reduce(torch.add, mine[::-1]) / dp))
            covered[name, rank % tp][place] += 1
    assert all(forwards)
    assert all(backwards) == (dp == 2)  # the order can be seen in the bits, from three ranks on
    assert all((count == 1).all() for count in covered.values())


@on_every_grid
@pytest.mark.parametrize("name", CASES)
def test_adamw_on_shards_is_torchs_adamw_to_the_bit(dp: int, tp: int, name: str) -> None:
    case = CASES[name]
    (expected,) = launch.run(cases.train_alone, (case, dp, tp))
    for rank, found in enumerate(facts(dp, tp)):
        for w in case.weights:
            whole = expected.values[w.name]
            assert not torch.equal(whole, cases.whole_start(w, tp))
            value = found["outcomes"][name].values[w.name]
            assert same(value, cases.cut(whole, w.dim, tp, rank % tp)), (rank, w.name)


@on_every_grid
def test_an_empty_parameter_is_no_obstacle(dp: int, tp: int) -> None:
    for found in facts(dp, tp):
        empty, full = found["empty"], found["outcomes"]["fp32"]
        assert empty.values.pop("empty").shape == (0, 3)
        assert same(empty.values, full.values)


@on_every_grid
@pytest.mark.parametrize("name", CASES)
def test_parameters_stay_in_the_flat_storage(dp: int, tp: int, name: str) -> None:
    assert all(found["homes"][name] for found in facts(dp, tp))


# ---- Storage ----------------------------------------------------------------------------------------------


def buffers(dtype: torch.dtype) -> ShardedBuffers:
    return ShardedBuffers([("a", parameter(3, 5, dtype=dtype)), ("b", parameter(4, dtype=dtype))], Grid.alone(), 10)


def test_the_map_is_told_each_parameters_name_shape_dtype_and_cut() -> None:
    cut = parameter(3, 5, dtype=torch.bfloat16)
    cut.tp_split_dim = 1  # type: ignore[attr-defined]
    assert [tuple(spec) for spec in specs_of([("cut", cut), ("whole", parameter(4))])] == [
        ("cut", (3, 5), "bfloat16", 1, "whole"),
        ("whole", (4,), "float32", None, "whole"),
    ]
    assert dtype_name(torch.float64) == "float64"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_parameters_are_their_own_masters(dtype: torch.dtype) -> None:
    b = buffers(dtype)
    for pieces in b.pieces.values():
        for piece in pieces:
            assert same_place(piece.weight, b.parameters[piece.index])


def test_bf16_parameters_have_float32_masters_of_their_own() -> None:
    b = buffers(torch.bfloat16)
    for pieces in b.pieces.values():
        for piece in pieces:
            assert piece.weight.dtype == piece.gradient.dtype == torch.float32
            assert torch.equal(piece.weight, b.parameters[piece.index].float().flatten())


def test_steps_too_small_for_bf16_add_up_in_the_masters() -> None:
    w = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    steps = optimizer(("w", w), lr=1e-4, weight_decay=0.0)  # of 1, bf16 can take away no less than 0.004
    for _ in range(100):
        w.grad = torch.ones_like(w)
        steps.step()
    (master,) = steps.buffers.masters.values()
    assert torch.allclose(master, torch.full_like(master, 0.99), atol=1e-5)
    assert torch.equal(w, master.bfloat16())


def test_a_parameter_of_any_strides_keeps_its_values() -> None:
    strided = nn.Parameter(gaussian(5, 3).mT)
    expected = strided.detach().clone()
    optimizer(("strided", strided))
    assert strided.is_contiguous()
    assert torch.equal(strided, expected)


def test_masters_follow_a_model_that_was_changed_from_outside_and_only_there() -> None:
    w = parameter(3, 4, dtype=torch.bfloat16)
    steps = optimizer(("w", w), lr=1e-4, weight_decay=0.0)
    for _ in range(3):  # until masters hold digits that the model has not
        w.grad = torch.ones_like(w)
        steps.step()
    (master,) = steps.buffers.masters.values()
    before = master.clone()
    w.data[1] = 3.0  # `.data` is what no version counter sees
    steps.buffers.refresh_masters()
    assert torch.equal(master.view(3, 4)[1], torch.full((4,), 3.0))
    assert torch.equal(master.view(3, 4)[::2], before.view(3, 4)[::2])
    assert not torch.equal(master.view(3, 4)[::2], w[::2].float())


# ---- Gradients on their way -------------------------------------------------------------------------------


def test_micro_batches_of_a_bf16_model_add_up_in_float32() -> None:
    w = parameter(2, 2, dtype=torch.bfloat16)
    plain = nn.Parameter(w.detach().clone())
    steps = optimizer(("w", w))
    for gradient in (256.0, *[1.0] * 8):  # 256 + 1 is 256 in bf16, eight times over
        (w.sum() * gradient).backward()
        (plain.sum() * gradient).backward()
    assert plain.grad is not None
    assert torch.equal(plain.grad, torch.full_like(plain, 256.0))
    assert w.grad is not None
    assert w.grad.data_ptr() == steps.buffers.gradient_homes[0].data_ptr()
    assert torch.equal(w.grad, torch.full((2, 2), 264.0))


def test_a_frozen_parameter_may_come_along_and_stays() -> None:
    w, frozen = parameter(3, 4), parameter(4)
    frozen.requires_grad_(False)
    steps = optimizer(("w", w), ("frozen", frozen))
    before = frozen.detach().clone()
    (w @ frozen).sum().backward()
    steps.step()
    assert not frozen.requires_grad
    assert torch.equal(frozen, before)


# ---- The optimizer ----------------------------------------------------------------------------------------


class Wrapped(Tensor):
    """A tensor of another kind, as DTensor is."""


SHARED = parameter(2, 3)


def build(params: Any, **options: Any) -> Callable[[], Zero1AdamW]:
    return lambda: Zero1AdamW(params, Grid.alone(), **options)


@pytest.mark.parametrize(
    ("kind", "words", "attempt"),
    [
        (TypeError, r"'momentum' \(0\); a group of adamw in Zero1AdamW has lr, betas, eps, weight_decay",
         build([{"params": [parameter(2)], "momentum": 0}])),
        (ValueError, "algorithm is 'muon'; choose one of adamw",
         build([{"params": [parameter(2)], "algorithm": "muon"}])),
        (ValueError, "'a' and 'b' share memory, and would not any more; use one Parameter",
         build([("a", SHARED), ("b", nn.Parameter(SHARED.data))])),
        (ValueError, "max_norm is -1", build([parameter(2)], max_norm=-1.0)),
        (ValueError, "max_norm is nan; give 0 or more", build([parameter(2)], max_norm=float("nan"))),
        (ValueError, "'w' is on the meta device", build([("w", nn.Parameter(torch.ones(2, device="meta")))])),
        (ValueError, "'w' has no shape yet", build([("w", nn.parameter.UninitializedParameter())])),
        (ValueError, "'w' is a Wrapped; the virtual map takes plain tensors",
         build([("w", nn.Parameter(torch.ones(2).as_subclass(Wrapped)))])),
        (ValueError, "dtype 'int64'", build([("count", nn.Parameter(torch.ones(2, dtype=torch.int64), False))])),
    ],
)  # fmt: skip
def test_what_adamw_cannot_take_is_refused_in_one_sentence(
    kind: type[Exception], words: str, attempt: Callable[[], Any]
) -> None:
    with pytest.raises(kind, match=words) as error:
        attempt()
    message(error)


def test_gradients_of_many_parameters_are_measured_and_clipped_in_as_many_operations_as_those_of_few() -> None:
    counts = []
    for number in (3, 30):
        steps = optimizer(*((str(place), parameter(2, 3)) for place in range(number)))
        for p in steps.param_groups[0]["params"]:
            p.grad = torch.ones(2, 3)
        steps._refusal = steps.collect()
        with torch.no_grad(), Operations() as operations:
            assert steps.check_and_clip(1e-3)
        assert steps.statistics.norm == pytest.approx((6 * number) ** 0.5)
        counts.append(operations.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("make", [Zero1AdamW, DistributedMuon])
def test_a_parameter_that_is_not_where_the_grid_is_stays_there_and_is_refused(make: Callable[..., Any]) -> None:
    """As on a GPU with `Grid.alone()`, which is a CPU's: parameters would move, and the inputs would not."""
    w = parameter(2, 3)
    with pytest.raises(ValueError, match=r"'w' is on cpu, and the grid on meta; move .* Grid\.alone\('cpu'\)") as error:
        make([("w", w)], Grid.alone("meta"))
    message(error)
    assert w.device == torch.device("cpu")


def test_other_parameters_in_the_groups_are_refused() -> None:
    w = parameter(2, 3)
    steps = optimizer(("w", w))
    for params in ([w, parameter(2, 3)], [parameter(2, 3)], []):
        steps.param_groups[0]["params"] = params
        with pytest.raises(RuntimeError, match="groups hold other parameters than at construction") as error:
            steps.step()
        message(error)


def test_inference_mode_is_refused() -> None:
    w = parameter(2, 3)
    steps = optimizer(("w", w))
    for attempt in (steps.step, lambda: optimizer(("w", w))):
        with (
            torch.inference_mode(),
            pytest.raises(RuntimeError, match="inference_mode nothing can be trained") as error,
        ):
            attempt()
        message(error)
