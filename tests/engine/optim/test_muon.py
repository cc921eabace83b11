"""Muon on one device: its arithmetic, torch's Muon as oracle, batches, several matrices, what is around Newton–Schulz.

The conformance kit and test_torch_conventions.py ask it for the rest: the paper's formula, groups, states, refusals.
"""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers_math import distance, gaussian, message
from torch import Tensor, nn

from distmuon.optim.batches import batches, matrices_in
from distmuon.optim.muon import Muon, decay_, momentum_, orthogonalize, scale
from distmuon.optim.newton_schulz import newton_schulz
from distmuon.optim.options import MOMENTA, MUON_DEFAULTS
from distmuon.sharding.matrices import MatrixLayout

SHAPES = [(12, 20), (20, 12), (16, 16)]
FLAT = 97  # elements of the flat tensors that get cut


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


# ---- Elementwise ------------------------------------------------------------------------------------------


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


def test_the_scale_gives_an_update_of_rms_one_fifth_or_the_original_factor() -> None:
    for a, b in [(12, 20), (20, 12), (7, 7)]:
        semi_orthogonal = torch.linalg.qr(gaussian(max(a, b), min(a, b), dtype=torch.float64)).Q
        assert semi_orthogonal.square().mean().sqrt() * scale((a, b)) == pytest.approx(0.2)
    assert scale((12, 3), "original") == 2.0
    assert scale((3, 12), "original") == 1.0
    assert scale((4, 16), "unit_rms") == 0.5


# ---- Against torch ----------------------------------------------------------------------------------------

ORACLE_SCALE = {"match_rms": "match_rms_adamw", "original": "original"}


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


# ---- Batches ----------------------------------------------------------------------------------------------


def test_matrices_that_go_together_keep_the_options_of_their_groups() -> None:
    options: list[dict[str, Any]] = [
        dict(lr=0.01, momentum=0.5),
        dict(lr=0.1, weight_decay=0.0, nesterov=False),
        dict(ns_steps=2, scale="original", momentum_kind="average"),
    ]
    shapes = [(8, 8)] * 3
    groups = [{"params": [p]} | o for p, o in zip(parameters(shapes), options, strict=True)]
    together = Muon(groups, **exact(batched=True))
    train(together)
    for index, (o, start) in enumerate(zip(options, parameters(shapes), strict=True)):
        alone = Muon([start], **o, **exact())
        for step in range(5):
            start.grad = gaussian(8, 8, seed=1000 * step + index)
            alone.step()
        torch.testing.assert_close(together.param_groups[index]["params"][0], start, rtol=1e-4, atol=1e-5)


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
        (gaussian(4, 6), plain | dict(input_norm="rows")),
        (gaussian(4, 6), plain | dict(output_norm="rows")),
        (gaussian(4, 6), plain | dict(normuon_beta2=0.95)),
    ]
    matrices, groups = [row[0] for row in rows], [row[1] for row in rows]
    assert batches(matrices, groups) == [[0, 2], *([index] for index in range(len(rows)) if index not in (0, 2))]
    alone = [group | dict(batched=False) for group in groups]
    assert batches(matrices, alone) == [[index] for index in range(len(rows))]


def test_a_batch_holds_as_many_matrices_as_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distmuon.optim.batches.BATCH", 50)
    matrices = [gaussian(4, 6, seed=seed) for seed in range(5)]
    assert batches(matrices, [MUON_DEFAULTS] * 5) == [[0, 1], [2, 3], [4]]
    monkeypatch.setattr("distmuon.optim.batches.BATCH", 10)  # less than one takes
    assert batches(matrices, [MUON_DEFAULTS] * 5) == [[0], [1], [2], [3], [4]]


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
@pytest.mark.parametrize("batched", [True, False])
def test_each_matrix_in_a_parameter_moves_as_if_it_were_one(kind: str, batched: bool) -> None:
    shape, matrices, by_hand = SEVERAL[kind]
    weight = nn.Parameter(gaussian(*shape))
    alone = [nn.Parameter(matrix.detach().clone()) for matrix in by_hand(weight)]
    together = Muon([weight], matrices=matrices, **exact(scale="unit_rms", batched=batched))
    apart = Muon(alone, **exact(scale="unit_rms"))
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


# ---- Bad days ---------------------------------------------------------------------------------------------


def test_a_model_narrowed_to_float16_halfway_trains_on() -> None:
    weights = [nn.Parameter(gaussian(6, 8).half().float()) for _ in range(2)]
    optimizers = [Muon([w], lr=0.2, **exact()) for w in weights]
    for step in range(4):
        for w, optimizer in zip(weights, optimizers, strict=True):
            w.grad = gaussian(6, 8, seed=step + 1).half().to(w.dtype)
            optimizer.step()
        if step == 0:
            weights[1].data = weights[1].data.half()
    assert weights[1].dtype == torch.float16
    assert distance(weights[1] - gaussian(6, 8), weights[0] - gaussian(6, 8)) < 1e-2


def test_an_embedding_gets_a_warning_by_name() -> None:
    with pytest.warns(UserWarning, match=r"'model\.embed_tokens\.weight' looks like an embedding"):
        Muon([("model.embed_tokens.weight", parameters()[0])])


def test_a_sparse_gradient_is_refused_by_name_before_anything_moves() -> None:
    first, table = parameters([(4, 4), (5, 3)])
    before = first.detach().clone()
    optimizer = Muon([("first", first), ("table", table)])
    first.grad, table.grad = gaussian(4, 4), gaussian(5, 3).to_sparse()
    with pytest.raises(RuntimeError, match=r"'table' has a sparse gradient") as error:
        optimizer.step()
    message(error)
    assert torch.equal(first.detach(), before)


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
