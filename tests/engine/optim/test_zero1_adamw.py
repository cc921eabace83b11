"""ZeRO-1 in one process: fp32 masters, gradients on their way there, and what is refused.

That reductions add in rank order, and that AdamW on shards is torch's to the bit, sharded_checks.py asks on real grids.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_math import Operations, gaussian, message
from torch import Tensor, nn

from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid


def optimizer(*named: tuple[str, Tensor], **options: Any) -> Zero1AdamW:
    return Zero1AdamW(list(named), Grid.alone(), **options)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(gaussian(*shape, dtype=dtype))


# ---- Storage ----------------------------------------------------------------------------------------------


def test_steps_too_small_for_bf16_add_up_in_the_masters() -> None:
    w = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    steps = optimizer(("w", w), lr=1e-4, weight_decay=0.0)  # of 1, bf16 can take away no less than 0.004
    for _ in range(100):
        w.grad = torch.ones_like(w)
        steps.step()
    (master,) = steps.buffers.masters.values()
    assert torch.allclose(master, torch.full_like(master, 0.99), atol=1e-5)
    assert torch.equal(w, master.bfloat16())


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
