"""Muon on one device: its elementwise arithmetic, the paper's formula by hand, torch's Muon as oracle, its errors."""

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers_math import distance, gaussian, message, quick
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from distmuon.optim.muon import Muon, apply_, batches, decay_, matrices_in, momentum_, orthogonalize, scale
from distmuon.optim.newton_schulz import newton_schulz, singular_values
from distmuon.optim.options import MOMENTA, MUON_DEFAULTS
from distmuon.sharding.matrices import MatrixLayout

SHAPES = [(12, 20), (20, 12), (16, 16)]
FLAT = 97  # elements of the flat tensors that get cut

cuts = st.lists(st.integers(0, FLAT), max_size=6).map(lambda points: sorted({0, FLAT, *points}))
dtypes = st.sampled_from([torch.float32, torch.float64])


def parameters(shapes: list[tuple[int, int]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(gaussian(*shape, seed=100 + i, dtype=dtype)) for i, shape in enumerate(shapes)]


def train(optimizer: torch.optim.Optimizer, steps: int = 5, first: int = 0) -> None:
    """Take steps on made-up gradients: the same ones for every optimizer over the same shapes."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        for i, p in enumerate(weights):
            p.grad = gaussian(*p.shape, seed=1000 * step + i, dtype=p.dtype)
        optimizer.step()


def moved(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return how far all weights together are from where `parameters` put them."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    start = parameters([tuple(p.shape) for p in weights], weights[0].dtype)
    return torch.cat([(p - q).detach().flatten() for p, q in zip(weights, start, strict=True)])


def exact(**options: Any) -> dict[str, Any]:
    """Return options under which two runs can agree to the bit."""
    return dict(compute_dtype=torch.float32, batched=False) | options


# ---- Elementwise: the same on any slices ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_momentum_and_decay_are_the_formulas_to_the_last_bit(dtype: torch.dtype) -> None:
    buffers, gradients = ([gaussian(FLAT, seed=seed, dtype=dtype) for seed in seeds] for seeds in ((1, 2), (3, 4)))
    sums, averages, decayed = ([b.clone() for b in buffers] for _ in range(3))
    fed, fed_averages = momentum_(sums, gradients, 0.95), momentum_(averages, gradients, 0.95, kind="average")
    decay_(decayed, 0.01, 0.1)
    for i, (buffer, gradient) in enumerate(zip(buffers, gradients, strict=True)):
        total, mean = buffer.mul(0.95).add(gradient), buffer.lerp(gradient, 1 - 0.95)
        assert torch.equal(sums[i], total)
        assert torch.equal(fed[i], gradient.add(total, alpha=0.95))
        assert torch.equal(averages[i], mean)
        assert torch.equal(fed_averages[i], gradient.lerp(mean, 0.95))
        assert torch.equal(decayed[i], buffer.mul(1 - 0.01 * 0.1))


@quick(40)
@given(cuts, dtypes, st.sampled_from(MOMENTA), st.booleans(), st.floats(0, 0.99))
def test_momentum_of_the_slices_is_the_slice_of_the_momentum(
    points: list[int], dtype: torch.dtype, kind: str, nesterov: bool, momentum: float
) -> None:
    buffer, gradient = gaussian(FLAT, seed=1, dtype=dtype), gaussian(FLAT, seed=2, dtype=dtype)
    sliced, pieces = buffer.clone(), []
    (whole,) = momentum_([buffer], [gradient], momentum, nesterov, kind)
    for start, end in pairwise(points):
        pieces += momentum_([sliced[start:end]], [gradient[start:end]], momentum, nesterov, kind)
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(sliced, buffer)


@quick(40)
@given(cuts, dtypes, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.floats(1e-4, 1))
def test_a_step_on_the_slices_is_the_slice_of_the_step(
    points: list[int], dtype: torch.dtype, update_dtype: torch.dtype, lr: float
) -> None:
    weight, update = gaussian(FLAT, seed=3, dtype=dtype), gaussian(FLAT, seed=4, dtype=update_dtype)
    sliced = weight.clone()
    decay_([weight], lr, 0.1)
    apply_([weight], [update], lr, scale((12, 20)))
    for start, end in pairwise(points):
        decay_([sliced[start:end]], lr, 0.1)
        apply_([sliced[start:end]], [update[start:end]], lr, scale((12, 20)))
    assert torch.equal(sliced, weight)


def test_momentum_updates_its_buffer_and_returns_a_new_tensor() -> None:
    for kind in MOMENTA:
        for nesterov in (True, False):
            buffer, gradient = torch.full((3,), 2.0), torch.ones(3)
            (fed,) = momentum_([buffer], [gradient], 0.5, nesterov, kind)
            after = {"sum": 2.0, "average": 1.5}[kind]
            ahead = {"sum": 0.5 * 2 + 1, "average": 0.5 * 1.5 + 0.5 * 1}[kind]
            assert buffer.tolist() == [after] * 3
            assert fed.tolist() == [ahead if nesterov else after] * 3
            assert gradient.tolist() == [1.0] * 3
            fed.zero_()
            assert buffer.tolist() == [after] * 3


def test_the_scale_gives_an_update_of_rms_one_fifth_or_the_original_factor() -> None:
    for a, b in [(12, 20), (20, 12), (7, 7)]:
        semi_orthogonal = torch.linalg.qr(gaussian(max(a, b), min(a, b), dtype=torch.float64)).Q
        assert semi_orthogonal.square().mean().sqrt() * scale((a, b)) == pytest.approx(0.2)
    assert scale((12, 3), "original") == 2.0
    assert scale((3, 12), "original") == 1.0


# ---- Against the paper, by hand ---------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_two_steps_are_the_papers_formula(shape: tuple[int, int], nesterov: bool) -> None:
    eta, mu, decay = 0.03, 0.9, 0.2
    (weight,) = parameters([shape], torch.float64)
    w, m = weight.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    optimizer = Muon([weight], lr=eta, momentum=mu, weight_decay=decay, nesterov=nesterov)
    for step in range(2):
        g = gaussian(*shape, seed=step, dtype=torch.float64)
        m = mu * m + g
        u = mu * m + g if nesterov else m
        x = u / math.sqrt((u * u).sum())
        for _ in range(5):
            xxt = x @ x.T
            x = 3.4445 * x - 4.7750 * xxt @ x + 2.0315 * xxt @ xxt @ x
        w = w - eta * (0.2 * math.sqrt(max(shape)) * x + decay * w)
        weight.grad = g.clone()
        optimizer.step()
        assert torch.equal(weight.grad, g)
    torch.testing.assert_close(weight.detach(), w, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], m)


def test_a_zero_gradient_leaves_pure_decay() -> None:
    (weight,) = parameters([(4, 6)])
    before = weight.detach().clone()
    weight.grad = torch.zeros(4, 6)
    Muon([weight], lr=0.5, weight_decay=0.25).step()
    assert torch.equal(weight.detach(), before * (1 - 0.5 * 0.25))


def test_weight_decay_never_enters_the_momentum() -> None:
    buffers = []
    for weight_decay in (0.0, 0.5):
        optimizer = Muon(parameters(), weight_decay=weight_decay)
        train(optimizer, steps=3)
        buffers.append([state["momentum_buffer"] for state in optimizer.state.values()])
    assert all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))


# ---- Against torch ----------------------------------------------------------------------------------------

ORACLE_SCALE = {"match_rms": "match_rms_adamw", "original": "original"}


@pytest.mark.parametrize("kind", MOMENTA)
@pytest.mark.parametrize("ours", ORACLE_SCALE)
@pytest.mark.parametrize("nesterov", [True, False])
def test_torch_agrees_to_bf16_rounding(kind: str, ours: str, nesterov: bool) -> None:
    options: dict[str, Any] = dict(momentum_kind=kind, scale=ours, nesterov=nesterov, compute_dtype=torch.bfloat16)
    mine = Muon(parameters(), lr=0.02, **options)
    torchs = torch.optim.Muon(parameters(), lr=0.02, nesterov=nesterov, adjust_lr_fn=ORACLE_SCALE[ours])
    train(mine, steps=10)
    train(torchs, steps=10)
    assert distance(moved(mine), moved(torchs)) < 0.02


@pytest.mark.parametrize("ours", ORACLE_SCALE)
@pytest.mark.parametrize("nesterov", [True, False])
def test_torchs_order_of_cast_and_norm_meets_torchs_own_weights_to_the_last_digits(ours: str, nesterov: bool) -> None:
    torchs_choices: dict[str, Any] = dict(
        scale=ours,
        momentum_kind="average",
        compute_dtype=torch.bfloat16,
        ns_form="standard",
        ns_norm="torch",
        batched=False,
    )
    shapes = [*SHAPES, (24, 75), (75, 18)]
    mine = Muon(parameters(shapes), lr=0.02, nesterov=nesterov, **torchs_choices)
    safe = Muon(parameters(shapes), lr=0.02, nesterov=nesterov, **torchs_choices | {"ns_norm": "safe"})
    torchs = torch.optim.Muon(parameters(shapes), lr=0.02, nesterov=nesterov, adjust_lr_fn=ORACLE_SCALE[ours])
    for optimizer in (mine, safe, torchs):
        train(optimizer, steps=10)
    assert distance(moved(mine), moved(torchs)) < 1e-6
    assert distance(moved(safe), moved(torchs)) > 1e-5


@pytest.mark.parametrize("kind", MOMENTA)
@pytest.mark.parametrize("ours", ORACLE_SCALE)
@pytest.mark.parametrize("nesterov", [True, False])
def test_torch_agrees_in_float64_once_its_cast_to_bf16_is_taken_out(
    monkeypatch: pytest.MonkeyPatch, kind: str, ours: str, nesterov: bool
) -> None:
    options: dict[str, Any] = dict(lr=0.03, momentum=0.9, weight_decay=0.2, nesterov=nesterov, ns_steps=4)
    own: dict[str, Any] = {"momentum_kind": kind, "scale": ours}
    mine = Muon(parameters(dtype=torch.float64), **own, **options)
    torchs = torch.optim.Muon(parameters(dtype=torch.float64), adjust_lr_fn=ORACLE_SCALE[ours], **options)
    train(mine, steps=10)
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)  # torch.optim.Muon calls it once, on what NS is fed
    train(torchs, steps=10)
    assert distance(moved(mine), moved(torchs)) < 1e-9


def test_summed_and_averaged_momentum_feed_newton_schulz_collinear_inputs() -> None:
    for nesterov in (True, False):
        buffers = {kind: torch.zeros(6, 8, dtype=torch.float64) for kind in MOMENTA}
        for step in range(4):
            gradient = gaussian(6, 8, seed=step, dtype=torch.float64)
            fed = {kind: momentum_([buffers[kind]], [gradient], 0.95, nesterov, kind)[0] for kind in MOMENTA}
            assert distance(fed["average"], 0.05 * fed["sum"]) < 1e-12
            assert distance(newton_schulz(fed["average"]), newton_schulz(fed["sum"])) < 1e-10


# ---- As an optimizer --------------------------------------------------------------------------------------


def test_every_group_keeps_its_own_options() -> None:
    options: list[dict[str, Any]] = [
        dict(lr=0.01, momentum=0.5),
        dict(lr=0.1, weight_decay=0.0, nesterov=False),
        dict(ns_steps=2, scale="original", momentum_kind="average", ns_coefficients="polar_express"),
    ]
    for batched in (False, True):
        shapes = [(8, 8)] * 3  # equal shapes: only the options keep them out of one batch
        together = Muon(
            [{"params": [p], **o} for p, o in zip(parameters(shapes), options, strict=True)], **exact(batched=batched)
        )
        train(together)
        for index, (o, start) in enumerate(zip(options, parameters(shapes), strict=True)):
            alone = Muon([start], **o, **exact())
            for step in range(5):
                start.grad = gaussian(8, 8, seed=1000 * step + index)
                alone.step()
            found = together.param_groups[index]["params"][0]
            if batched:
                torch.testing.assert_close(found, start, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(found, start)


def test_batching_changes_nothing_but_rounding() -> None:
    shapes = [(12, 20)] * 3 + [(20, 12)] * 2 + [(16, 16)]
    runs = [Muon(parameters(shapes), compute_dtype=torch.float32, batched=batched) for batched in (True, False)]
    for run in runs:
        train(run, steps=3)
    assert distance(moved(runs[0]), moved(runs[1])) < 1e-5


def test_only_small_matrices_of_equal_shape_dtype_and_options_go_together() -> None:
    plain = MUON_DEFAULTS
    rows: list[tuple[Tensor, dict[str, Any]]] = [
        (gaussian(4, 6), plain),
        (gaussian(6, 4), plain),
        (gaussian(4, 6, seed=1), dict(plain)),
        (gaussian(4, 6), plain | dict(ns_steps=3)),
        (gaussian(4, 6), plain | dict(ns_coefficients=(1.875, -1.25, 0.375))),
        (gaussian(4, 6, dtype=torch.float64), plain),
        (gaussian(400, 600), plain),
        (gaussian(400, 600), plain),
        (gaussian(4, 6), plain | dict(ns_form="gram")),
        (gaussian(4, 6), plain | dict(ns_norm="torch")),
    ]
    matrices, groups = [row[0] for row in rows], [row[1] for row in rows]
    assert batches(matrices, groups) == [[0, 2], [1], [3], [4], [5], [6], [7], [8], [9]]
    alone = [group | dict(batched=False) for group in groups]
    assert batches(matrices, alone) == [[index] for index in range(len(rows))]


def test_a_batch_holds_as_many_matrices_as_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distmuon.optim.muon.BATCH", 50)
    matrices = [gaussian(4, 6, seed=seed) for seed in range(5)]
    assert batches(matrices, [MUON_DEFAULTS] * 5) == [[0, 1], [2, 3], [4]]
    monkeypatch.setattr("distmuon.optim.muon.BATCH", 10)  # less than one takes
    assert batches(matrices, [MUON_DEFAULTS] * 5) == [[0], [1], [2], [3], [4]]


def test_a_batch_is_orthogonalized_like_its_matrices_alone() -> None:
    group = MUON_DEFAULTS | dict(ns_coefficients="polar_express")
    inputs = [gaussian(4, 6, seed=seed) for seed in range(3)]
    for result, matrix in zip(orthogonalize(inputs, group), inputs, strict=True):
        alone = newton_schulz(matrix, 5, "polar_express")
        assert result.dtype == matrix.dtype
        torch.testing.assert_close(result, alone, rtol=2e-2, atol=2e-2)


def test_every_form_and_norm_is_an_option_of_a_group() -> None:
    shapes = [(40, 100)] * 2
    options: dict[str, Any] = dict(lr=0.02, compute_dtype=torch.float32)
    forms = [Muon(parameters(shapes), ns_form=form, **options) for form in ("standard", "gram")]
    for run in forms:
        train(run, steps=3)
    assert 0 < distance(moved(forms[1]), moved(forms[0])) < 1e-5
    half = Muon(parameters(shapes), ns_form="gram", **options | {"compute_dtype": torch.float16})
    train(half, steps=3)
    assert 0 < distance(moved(half), moved(forms[0])) < 2e-2


def test_input_dtype_rounds_what_newton_schulz_is_fed_and_nothing_else() -> None:
    (weight,) = parameters([(6, 9)])
    expected, gradient = weight.detach().clone(), gaussian(6, 9)
    weight.grad = gradient.clone()
    optimizer = Muon([weight], lr=0.1, momentum=0.5, input_dtype=torch.bfloat16, **exact())
    optimizer.step()
    fed = (gradient + 0.5 * gradient).bfloat16()
    decay_([expected], 0.1, 0.1)
    apply_([expected], [newton_schulz(fed, compute_dtype=torch.float32)], 0.1, scale((6, 9)))
    assert torch.equal(weight.detach(), expected)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_state_and_weights_keep_the_dtype_and_strides_of_the_parameter(dtype: torch.dtype) -> None:
    weight = nn.Parameter(gaussian(6, 4, dtype=dtype).T)
    train(Muon([weight]), steps=1)
    assert weight.dtype == dtype
    assert weight.stride() == (1, 4)
    assert weight.isfinite().all()


# ---- Several matrices in a parameter ----------------------------------------------------------------------

SEVERAL: dict[str, tuple[tuple[int, ...], Any, Callable[[Tensor], list[Tensor]]]] = {  # shape, option, by hand
    "stacked": ((5, 6, 9), "stacked", lambda t: list(t)),
    "flattened": ((8, 3, 2, 2), "flattened", lambda t: [t.view(8, 12)]),
    "rows": ((12, 7), ("rows", 4), lambda t: [t[:3], t[3:6], t[6:9], t[9:]]),
    "columns": ((7, 12), ("columns", 2), lambda t: [t[:, :6], t[:, 6:]]),
    "fused": ((16, 10), ("fused", (12, 2, 2)), lambda t: [t[:12], t[12:14], t[14:]]),
    "heads of fused": ((12, 5), ("fused", ((6, 3), (3, 1), 3)), lambda t: [t[:2], t[2:4], t[4:6], t[6:9], t[9:]]),
    "large": ((2, 300, 500), "stacked", lambda t: list(t)),
}
each_kind = pytest.mark.parametrize("kind", SEVERAL)


@each_kind
@pytest.mark.parametrize("scale_kind", ["match_rms", "original"])
@pytest.mark.parametrize("batched", [True, False])
def test_each_matrix_in_a_parameter_moves_as_if_it_were_one(kind: str, scale_kind: str, batched: bool) -> None:
    shape, matrices, by_hand = SEVERAL[kind]
    weight = nn.Parameter(gaussian(*shape))
    alone = [nn.Parameter(matrix.detach().clone()) for matrix in by_hand(weight)]
    together = Muon([weight], matrices=matrices, **exact(scale=scale_kind, batched=batched))
    apart = Muon(alone, **exact(scale=scale_kind))
    for step in range(3):
        weight.grad = gaussian(*shape, seed=step)
        for matrix, gradient in zip(alone, by_hand(weight.grad), strict=True):
            matrix.grad = gradient.clone()
        together.step()
        apart.step()
    for found, expected in zip(by_hand(weight.detach()), alone, strict=True):
        assert distance(found, expected) < 1e-5
        assert batched or torch.equal(found, expected)


@each_kind
def test_the_formula_holds_for_every_matrix_by_hand(kind: str) -> None:
    shape, matrices, by_hand = SEVERAL[kind]
    weight, gradient = nn.Parameter(gaussian(*shape)), gaussian(*shape, seed=1)
    start, weight.grad = weight.detach().clone(), gradient.clone()
    Muon([weight], lr=0.1, momentum=0.5, weight_decay=0.3, matrices=matrices, **exact()).step()
    for found, w, g in zip(by_hand(weight.detach()), by_hand(start), by_hand(gradient), strict=True):
        update = newton_schulz((1.5 * g).clone(), compute_dtype=torch.float32)
        expected = w - 0.1 * (0.2 * max(g.shape) ** 0.5 * update + 0.3 * w)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@each_kind
def test_strides_of_a_parameter_change_nothing(kind: str) -> None:
    shape, matrices, _ = SEVERAL[kind]
    plain = nn.Parameter(gaussian(*shape))
    strided = nn.Parameter(plain.detach().movedim(0, -1).contiguous().movedim(-1, 0))
    assert not strided.is_contiguous()
    for weight in (plain, strided):
        weight.grad = gaussian(*shape, seed=3)
        Muon([weight], matrices=matrices, **exact()).step()
    assert torch.equal(plain, strided)


def test_matrices_of_one_shape_go_together_whatever_holds_them() -> None:
    """[4, 6] thirteen times, in four parameters of four kinds: one batch."""
    shapes: dict[Any, tuple[int, ...]] = {
        "whole": (4, 6),
        "stacked": (5, 4, 6),
        ("rows", 3): (12, 6),
        ("columns", 4): (4, 24),
    }
    tensors = [gaussian(*shape, seed=seed) for seed, shape in enumerate(shapes.values())]
    groups = [MUON_DEFAULTS | dict(matrices=matrices, compute_dtype=torch.float32) for matrices in shapes]
    assert batches(tensors, groups) == [[0, 1, 2, 3]]

    def singles(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[0], *tensors[1], *tensors[2].split(4), *tensors[3].split(6, 1)]

    expected = [newton_schulz(single, compute_dtype=torch.float32) for single in singles(tensors)]
    found = orthogonalize(tensors, groups[0], [MatrixLayout(group["matrices"]) for group in groups])
    assert [tuple(t.shape) for t in found] == list(shapes.values())
    for piece, single in zip(singles(found), expected, strict=True):
        assert distance(piece, single) < 1e-5


def test_the_wrong_matrices_for_a_parameter_are_refused_at_once_and_later() -> None:
    with pytest.raises(ValueError, match=r"parameter '#0' of shape \(5, 6, 9\) has matrices='whole'; .*'stacked'"):
        Muon([nn.Parameter(gaussian(5, 6, 9))])
    optimizer = Muon([nn.Parameter(gaussian(5, 6, 9))], matrices="stacked")
    with pytest.raises(ValueError, match="5 does not divide its 12 rows") as error:
        optimizer.add_param_group({"params": [nn.Parameter(gaussian(12, 6))], "matrices": ("rows", 5)})
    assert len(optimizer.param_groups) == 1
    message(error)


def test_matrices_survive_a_state_that_goes_through_a_file() -> None:
    weights = [nn.Parameter(gaussian(16, 10)) for _ in range(2)]
    saver, loader = Muon(weights[:1], matrices=("fused", [12, 2, 2])), Muon(weights[1:], matrices=("rows", 4))
    weights[0].grad = gaussian(16, 10, seed=1)
    saver.step()
    file = io.BytesIO()
    torch.save(saver.state_dict(), file)
    file.seek(0)
    loader.load_state_dict(torch.load(file, weights_only=True))
    assert loader.param_groups[0]["matrices"] == ("fused", [12, 2, 2])
    weights[1].data.copy_(weights[0].data)
    for weight, optimizer in zip(weights, (saver, loader), strict=True):
        weight.grad = gaussian(16, 10, seed=2)
        optimizer.step()
    assert torch.equal(weights[0], weights[1])


# ---- Errors -----------------------------------------------------------------------------------------------


def bad(make: Callable[[], Tensor]) -> nn.Parameter:
    return nn.Parameter(make(), requires_grad=False)


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        (bad(lambda: torch.zeros(3)), "1 dimension"),
        (bad(lambda: torch.zeros(2, 3, 3, 3)), r"\(2, 3, 3, 3\) has matrices='whole'; .*AdamW"),
        (bad(lambda: torch.zeros(0, 3)), "empty"),
        (bad(lambda: torch.eye(3).to_sparse()), "sparse"),
        (bad(lambda: torch.zeros(2, 2, dtype=torch.complex64)), "complex64"),
        (bad(lambda: torch.zeros(2, 2, dtype=torch.int32)), "int32"),
    ],
    ids=["1-D", "4-D", "empty", "sparse", "complex", "integer"],
)
def test_a_parameter_that_is_no_matrix_is_refused_by_name(parameter: nn.Parameter, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        Muon([("good.weight", parameters()[0]), ("bad.weight", parameter)])
    assert "'bad.weight'" in message(error)
    with pytest.raises(ValueError, match=f"'#1'.*{says}"):
        Muon([parameters()[0], parameter])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scale", "match_rms_adamw"),
        ("momentum_kind", "ema"),
        ("lr", -0.1),
        ("lr", math.nan),
        ("weight_decay", -0.1),
        ("momentum", 1.0),
        ("momentum", -0.5),
        ("ns_steps", -3),
        ("ns_coefficients", "moun"),
        ("ns_form", "grams"),
        ("ns_norm", "bf16"),
        ("matrices", "heads"),
    ],
)
def test_a_wrong_value_is_refused_by_value_wherever_it_is_given(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        Muon(parameters(), **{option: value})
    assert str(value) in message(error)
    with pytest.raises(ValueError, match=r"."):
        Muon([{"params": parameters(), option: value}])
    late = Muon(parameters())
    with pytest.raises(ValueError, match=r"."):
        late.add_param_group({"params": parameters(), option: value})


def test_a_group_added_later_is_checked_for_matrices_too() -> None:
    optimizer = Muon(parameters())
    with pytest.raises(ValueError, match="1 dimension"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_an_embedding_gets_a_warning_by_name_and_a_hidden_matrix_none() -> None:
    with pytest.warns(UserWarning, match=r"'model\.embed_tokens\.weight' looks like an embedding"):
        Muon([("model.embed_tokens.weight", parameters()[0])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon([("model.layers.0.up.weight", parameters()[0])])
        Muon(parameters())


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("compute_dtype", torch.int32, "'auto'.*float16"),
        ("compute_dtype", torch.float8_e4m3fn, "'auto'.*float16"),
        ("compute_dtype", "bf16", "'auto'.*torch.bfloat16"),
        ("input_dtype", torch.float16, "None.*torch.bfloat16"),
        ("input_dtype", "bfloat16", "None.*torch.bfloat16"),
    ],
)
def test_a_dtype_that_cannot_be_is_refused_when_the_optimizer_is_made(option: str, value: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"{option} is {value!r}; give {says}") as error:
        Muon([{"params": parameters(), option: value}])
    message(error)


def test_float16_is_refused_where_a_momentum_would_live_in_it() -> None:
    with pytest.raises(ValueError, match=r"'up' is torch\.float16.*bfloat16 or float32") as error:
        Muon([("up", nn.Parameter(gaussian(4, 6).half()))])
    message(error)


@pytest.mark.parametrize("magnitude", [1e-7, 6e4])
def test_a_model_narrowed_to_float16_halfway_trains_on_at_every_size_of_gradient(magnitude: float) -> None:
    weights = [nn.Parameter(gaussian(6, 8).half().float()) for _ in range(2)]
    optimizers = [Muon([w], lr=0.2, **exact()) for w in weights]
    for step in range(8):
        gradient = (gaussian(6, 8, seed=step + 1) * magnitude).half().clamp(-6e4, 6e4)
        for w, optimizer in zip(weights, optimizers, strict=True):
            w.grad = gradient.to(w.dtype)
            optimizer.step()
        if step == 0:
            weights[1].data = weights[1].data.half()
    assert torch.isfinite(weights[1]).all()
    assert weights[1].dtype == torch.float16
    assert distance(weights[1] - gaussian(6, 8), weights[0] - gaussian(6, 8)) < 1e-2


def test_a_group_says_whose_it_is() -> None:
    Muon([{"params": parameters(), "algorithm": "muon"}])
    with pytest.raises(ValueError, match=r"algorithm='adamw'.*torch\.optim\.AdamW.*DistributedMuon") as error:
        Muon([{"params": parameters(), "algorithm": "adamw"}])
    message(error)


def test_a_sparse_gradient_is_refused_by_name_before_anything_moves() -> None:
    first, table = parameters([(4, 4), (5, 3)])
    before = first.detach().clone()
    optimizer = Muon([("first", first), ("table", table)])
    first.grad, table.grad = gaussian(4, 4), gaussian(5, 3).to_sparse()
    with pytest.raises(RuntimeError, match=r"'table' has a sparse gradient") as error:
        optimizer.step()
    message(error)
    assert torch.equal(first.detach(), before)


@pytest.mark.parametrize("other", [torch.optim.Muon, torch.optim.AdamW])
def test_the_state_of_another_optimizer_is_refused_and_changes_nothing(other: Any) -> None:
    theirs, ours, undisturbed = other(parameters()), Muon(parameters()), Muon(parameters())
    train(theirs, 2)
    train(ours, 2)
    train(undisturbed, 4)
    with pytest.raises(ValueError, match=r"lack momentum_kind|lack momentum, .*momentum_kind") as error:
        ours.load_state_dict(theirs.state_dict())
    message(error)
    train(ours, 2, first=2)
    assert torch.equal(moved(ours), moved(undisturbed))


def test_a_state_that_lacks_an_option_can_be_loaded_with_a_hook() -> None:
    saved = Muon(parameters(), lr=0.3).state_dict()
    del saved["param_groups"][0]["batched"]
    resumed = Muon(parameters())
    resumed.register_load_state_dict_pre_hook(lambda _, state: state["param_groups"][0].update(batched=True))
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == 0.3
    train(resumed, 1)


def test_a_step_can_be_compiled() -> None:
    plain, compiled = (Muon(parameters(SHAPES[:1])) for _ in range(2))
    move = torch.compile(compiled.step, backend="eager")
    for optimizer, take in ((plain, plain.step), (compiled, move)):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = gaussian(*p.shape, seed=7)
        take()
    assert torch.equal(moved(plain), moved(compiled))


def test_torch_speaks_up_when_a_parameter_is_given_twice() -> None:
    (weight,) = parameters([(4, 4)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        Muon([weight, weight])
    with pytest.raises(ValueError, match="more than one parameter group"):
        Muon([{"params": [weight]}, {"params": [weight]}])


# ---- Before and after Newton–Schulz, and decay with care ----------------------------------------------------


def stepped(gradient: torch.Tensor, weight: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Return a weight, by default of zeros, after one step without momentum."""
    p = nn.Parameter(torch.zeros_like(gradient) if weight is None else weight.clone())
    p.grad = gradient.clone()
    Muon([p], **{"momentum": 0.0, "nesterov": False, "lr": 1.0, "weight_decay": 0.0, **options}).step()
    return p.detach()


def lengths(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=dim, keepdim=True)


UNEVEN = torch.logspace(0, 3, 6, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize(("how", "over"), [("rows", [1]), ("columns", [0]), ("both", [0, 1])])
def test_an_input_is_equalized_at_any_scale_and_zeros_stay(how: str, over: list[int], scale: float) -> None:
    gradient = gaussian(6, 9, dtype=torch.float64) * UNEVEN
    gradient[2] = 0
    equal = gradient.clone()
    for dim in over:
        equal /= lengths(gradient, dim).clamp(min=1e-300)  # each by its length from before
    found = stepped(gradient * scale, input_norm=how)
    torch.testing.assert_close(found, stepped(equal), rtol=1e-9, atol=1e-12)
    assert found[2].count_nonzero() == 0


@pytest.mark.parametrize("how", ["rows", "columns", "rows_columns", "columns_rows"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_an_output_is_normalized_and_keeps_its_norm(how: str, shape: tuple[int, int]) -> None:
    gradient = gaussian(*shape, dtype=torch.float64)
    plain, found = stepped(gradient), stepped(gradient, output_norm=how)
    wanted = plain
    for which in how.split("_"):
        wanted = wanted / lengths(wanted, 1 if which == "rows" else 0)
    torch.testing.assert_close(found, wanted * plain.norm() / wanted.norm(), rtol=1e-12, atol=1e-14)
    last = lengths(found, 1 if how.endswith("rows") else 0)
    assert last.max() == pytest.approx(last.min().item(), rel=1e-9)


def test_normalizing_leaves_a_matrix_of_zeros_and_spreads_a_nan_over_its_matrix_alone() -> None:
    stack = gaussian(3, 4, 6)
    stack[1], stack[2, 0, 0] = 0, torch.nan
    found = stepped(stack, matrices="stacked", input_norm="both", output_norm="rows_columns")
    assert found[0].isfinite().all()
    assert found[1].count_nonzero() == 0
    assert found[2].isnan().all()


def by_hand(gradients: Sequence[Tensor], beta2: float) -> list[Tensor]:
    """Return NorMuon's updates for these gradients, one matrix each, row by row."""
    found, squares = [], [0.0] * len(gradients[0])
    for gradient in gradients:
        update = -stepped(gradient, scale="original") / scale(gradient.shape, "original")
        turned = update.clone()
        for i, row in enumerate(update.tolist()):
            mean = sum(x * x for x in row) / len(row)
            squares[i] = beta2 * squares[i] + (1 - beta2) * mean
            turned[i] /= squares[i] ** 0.5 + 1e-8
        found.append(turned * update.norm() / turned.norm())
    return found


@pytest.mark.parametrize("kind", ["whole", "stacked", "flattened", ("rows", 3), ("columns", 2), ("fused", (2, 4))])
@pytest.mark.parametrize("batched", [True, False])
def test_normuon_is_its_formula_for_the_rows_of_every_matrix(kind: Any, batched: bool) -> None:
    """Three steps, and two more after a state went through a file."""
    shape = {"stacked": (3, 6, 8), "flattened": (6, 4, 3)}.get(kind, (6, 8))
    gradients = [gaussian(*shape, seed=seed, dtype=torch.float64) for seed in range(5)]
    options: dict[str, Any] = dict(momentum=0.0, nesterov=False, lr=1.0, weight_decay=0.0, batched=batched)
    options |= dict(matrices=kind, normuon_beta2=0.7)
    layout, wanted = MatrixLayout(kind), [torch.zeros(shape, dtype=torch.float64) for _ in gradients]
    numbers = [view.numel() // math.prod(a_b) for a_b, view in matrices_in(gradients[0].clone(), layout)]
    for part, number in enumerate(numbers):
        cut = [matrices_in(gradient, layout)[part] for gradient in gradients]
        places = [matrices_in(update, layout)[part][1] for update in wanted]
        (a, b), _ = cut[0]
        for one in range(number):
            mine = [view.reshape(-1, a, b)[one] for _, view in cut]
            for place, update in zip(places, by_hand(mine, 0.7), strict=True):
                place.reshape(-1, a, b)[one] = scale((a, b)) * update
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = Muon([p], **options)
    for step, gradient in enumerate(gradients):
        before, p.grad = p.detach().clone(), gradient.clone()
        optimizer.step()
        torch.testing.assert_close(before - p.detach(), wanted[step], rtol=1e-9, atol=1e-12)
        if step == 2:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = Muon([p], **options | {"normuon_beta2": None})  # which the state sets again
            optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert optimizer.state[p]["row_exp_avg_sq"].dtype == torch.float64


def test_normuon_leaves_rows_of_zeros_and_can_be_switched_on_and_off() -> None:
    gradient = gaussian(5, 7)
    gradient[1] = 0
    p = nn.Parameter(torch.zeros(5, 7))
    optimizer = Muon([p], weight_decay=0.0)
    for beta2 in (None, 0.9, 0.0, None):
        p.grad, optimizer.param_groups[0]["normuon_beta2"] = gradient.clone(), beta2
        before = p.detach().clone()
        optimizer.step()
        assert p[1].count_nonzero() == 0
        rows = lengths(p.detach() - before, 1)[[0, 2, 3, 4]]
        assert (rows.max() < 1.001 * rows.min()) == (beta2 is not None)  # the first step of any mean is that
    assert optimizer.state[p]["row_exp_avg_sq"].dtype == torch.float32


def test_a_state_without_the_rows_that_normuon_needs_is_refused() -> None:
    p = nn.Parameter(gaussian(4, 6))
    optimizer = Muon([p], normuon_beta2=0.95)
    train(optimizer, 1)
    saved = optimizer.state_dict()
    for wrong, says in (
        (None, "lacks row_exp_avg_sq"),
        (torch.zeros(6), r"has the shape \[6\] in this state, and \[4\]"),
    ):
        state = {0: {k: v for k, v in saved["state"][0].items() if k != "row_exp_avg_sq"}}
        if wrong is not None:
            state[0]["row_exp_avg_sq"] = wrong
        with pytest.raises(ValueError, match=says) as error:
            Muon([p], normuon_beta2=0.95).load_state_dict(saved | {"state": state})
        message(error)
    optimizer.param_groups[0]["matrices"] = ("columns", 2)
    with pytest.raises(RuntimeError, match=r"wants \[8\] for its row_exp_avg_sq now, and has \[4\]") as refused:
        train(optimizer, 1)
    message(refused)


def test_careful_decay_touches_what_the_update_makes_smaller() -> None:
    gradient, weight = gaussian(5, 7, seed=1), gaussian(5, 7, seed=2)
    weight[0] = 0
    update = -stepped(gradient, lr=0.1)  # lr scale O
    found = stepped(gradient, weight, lr=0.1, weight_decay=0.5, cautious_decay=True)
    decayed = torch.where(weight * update >= 0, weight * (1 - 0.1 * 0.5), weight)
    torch.testing.assert_close(found, decayed - update)
    everywhere = stepped(gradient, weight, lr=0.1, weight_decay=0.5)
    assert 0.2 < (found == everywhere).double().mean() < 0.8


@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (5, 5)])
def test_unit_rms_moves_inputs_of_rms_one_by_about_one(shape: tuple[int, int]) -> None:
    a, b = shape
    assert scale(shape, "unit_rms") == pytest.approx((a / b) ** 0.5)
    step = -stepped(gaussian(a, b, dtype=torch.float64), scale="unit_rms", ns_coefficients="deepseek_v4", ns_steps=10)
    assert singular_values(step).max() == pytest.approx((a / b) ** 0.5, rel=2e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input_norm": "row"}, "input_norm is 'row'; choose one of rows, columns, both, or None."),
        ({"output_norm": "both"}, "output_norm is 'both'; choose one of rows, columns, rows_columns, columns_rows"),
        ({"normuon_beta2": 1.0}, "normuon_beta2 is 1.0; give 0 or more and less than 1, or None for no NorMuon."),
        ({"cautious_decay": "yes"}, "cautious_decay is 'yes'; give True or False."),
        ({"scale": "spectral"}, "scale is 'spectral'; choose one of match_rms, original, unit_rms."),
    ],
)
def test_a_variant_that_does_not_exist_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Muon([nn.Parameter(torch.zeros(2, 3))], **options)
