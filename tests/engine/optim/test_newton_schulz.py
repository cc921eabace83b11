"""Newton–Schulz: against the singular value decomposition, under symmetries, at every scale, dtype and shape."""

import math
import sys
from typing import Any

import pytest
import torch
from gram_errors import gram_errors
from helpers_math import distance, gaussian, message, quick
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode
from wide_products import WideProducts

from distmuon.optim import gram as gram_module
from distmuon.optim import newton_schulz as module
from distmuon.optim.coefficients import AS_A_WHOLE, CANS, COEFFICIENTS, CUBIC5, MUON, POLAR_EXPRESS, quintics
from distmuon.optim.fast_paths import (
    STEEPEST,
    batching_pays,
    fast_dtype,
    fast_form,
    half_gram_pays,
)
from distmuon.optim.gram import (
    HALF_SCALE,
    GramWorkspace,
    gram_iterate_,
    half_gram_iterate,
    strip_bounds,
)
from distmuon.optim.newton_schulz import (
    _iterate,
    cosine_to_polar,
    flops,
    newton_schulz,
    newton_schulz_,
    orthogonality_error,
    polar_factor,
    singular_values,
    unit_frobenius_,
)
from tools.spectra import spectra

CLASSIC = (15 / 8, -10 / 8, 3 / 8)  # converges to exactly 1 from everywhere in (0, 1]
FIVE = [MUON] * 5
FLOAT_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
COMPUTE_DTYPES = [torch.float64, torch.float32, torch.bfloat16]
LARGE_FOR_GRAM = (512, 1040)  # rows enough for strips
SHAPES = [(8, 8), (6, 15), (15, 6), (1, 9), (9, 1)]

sides = st.integers(1, 24)
seeds = st.integers(0, 10_000)
either_form = pytest.mark.parametrize("form", ["standard", "gram"])


def orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(gaussian(size, size, seed=seed, dtype=torch.float64)).Q


def with_singular_values(values: Tensor, rows: int, columns: int, seed: int) -> Tensor:
    """Return a float64 matrix [rows, columns] with these singular values and random singular directions."""
    k = len(values)
    return orthogonal(rows, seed)[:, :k] * values @ orthogonal(columns, seed + 1)[:, :k].T


def compose(polynomials: list[tuple[float, float, float]], s: Tensor) -> Tensor:
    """Return what the quintics make of the singular values `s`."""
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return s


# ---- Against the decomposition ----------------------------------------------------------------------------


@either_form
@quick(40)
@given(sides, sides, seeds, st.floats(1.0, 10.0), st.sampled_from(COMPUTE_DTYPES))
def test_five_muon_steps_bring_every_singular_value_near_one(
    form: str, rows: int, columns: int, seed: int, condition: float, dtype: torch.dtype
) -> None:
    k = min(rows, columns)
    matrix = with_singular_values(torch.linspace(1, 1 / condition, k, dtype=torch.float64), rows, columns, seed)
    result = newton_schulz(matrix, compute_dtype=dtype, form=form)
    values = singular_values(result)
    assert values.min() >= 0.6
    assert values.max() <= 1.25
    assert cosine_to_polar(matrix, result) > 0.97


@quick(30)
@given(sides, sides, seeds)
def test_singular_values_follow_the_scalar_polynomial_and_directions_stay(rows: int, columns: int, seed: int) -> None:
    values = torch.linspace(1, 0.1, min(rows, columns), dtype=torch.float64)
    matrix = with_singular_values(values, rows, columns, seed)
    expected = with_singular_values(compose([MUON] * 5, values / values.norm()), rows, columns, seed)
    assert distance(newton_schulz(matrix), expected) < 1e-10


@pytest.mark.parametrize(("polynomials", "close"), [(POLAR_EXPRESS, 1e-8), (CANS, 6e-3)], ids=["polar_express", "cans"])
def test_every_published_step_errs_as_far_below_one_as_above(polynomials: Any, close: float) -> None:
    s = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    for quintic in polynomials:  # what makes a step optimal; one wrong digit would tip it. Those of CANS have four
        s = compose([quintic], s)
        assert abs((s.min() - 1) + (s.max() - 1)) < close


def test_published_schedules_end_in_their_bands() -> None:
    s = torch.logspace(math.log10(7e-3), 0, 100_001, dtype=torch.float64)
    assert (compose(quintics("deepseek_v4", 10), s) - 1).abs().max() < 1e-3
    for cubic in CUBIC5:
        s = compose([cubic], s)
        assert s.max() == pytest.approx(1.3, abs=1e-4)
    assert s.min() == pytest.approx(0.774, abs=1e-3)


@pytest.mark.parametrize("name", COEFFICIENTS)
@either_form
def test_every_schedule_maps_singular_values_as_its_polynomials_do(name: str, form: str) -> None:
    steps = len(COEFFICIENTS[name]) if name in AS_A_WHOLE else 5
    values = torch.logspace(0, -2, 6, dtype=torch.float64)
    matrix = with_singular_values(values, 6, 9, seed=3)
    found = newton_schulz(matrix, steps, name, form=form)
    wanted = compose(quintics(name, steps), values / values.norm())
    torch.testing.assert_close(singular_values(found), wanted.sort(descending=True).values, rtol=1e-9, atol=1e-9)


# ---- Symmetries -------------------------------------------------------------------------------------------


@either_form
@quick(20)
@given(sides, sides, seeds)
def test_transposing_and_negating_commute_with_it(form: str, rows: int, columns: int, seed: int) -> None:
    matrix = gaussian(rows, columns, seed=seed, dtype=torch.float64)
    result = newton_schulz(matrix, form=form)
    assert distance(newton_schulz(matrix.mT, form=form), result.mT) < 1e-10
    assert torch.equal(newton_schulz(-matrix, form=form), -result)


@either_form
@quick(40)
@given(st.integers(-100, 100), st.sampled_from(SHAPES), st.sampled_from(FLOAT_DTYPES))
def test_a_power_of_two_does_not_change_one_bit(
    form: str, exponent: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrix = gaussian(*shape)
    scaled = newton_schulz(matrix * 2.0**exponent, compute_dtype=dtype, form=form)
    assert torch.equal(scaled, newton_schulz(matrix, compute_dtype=dtype, form=form))


# ---- Dtypes -----------------------------------------------------------------------------------------------


def test_lower_precision_costs_what_it_should_and_no_more() -> None:
    matrix = gaussian(96, 64, dtype=torch.float64)
    exact = newton_schulz(matrix, compute_dtype=torch.float64)
    errors = {dtype: distance(newton_schulz(matrix, compute_dtype=dtype), exact) for dtype in FLOAT_DTYPES}
    assert errors[torch.float64] == 0
    assert 1e-8 < errors[torch.float32] < 1e-5
    assert 1e-4 < errors[torch.float16] < 1e-2
    assert 3e-3 < errors[torch.bfloat16] < 5e-2


@pytest.mark.parametrize("magnitude", [1e-6, 1e4])
def test_half_precision_input_survives_at_both_ends_of_its_range(magnitude: float) -> None:
    matrix = (gaussian(8, 12) * magnitude).half()  # its squares underflow, or overflow, in half precision
    for compute in (torch.float16, torch.bfloat16, torch.float32):
        result = newton_schulz(matrix, compute_dtype=compute)
        assert distance(result, newton_schulz(matrix.double())) < 5e-2


LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # on what oneDNN uses of a processor: the name, and the former one


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in LIMITS:
        monkeypatch.delenv(limit, raising=False)


@pytest.mark.usefixtures("unlimited")
def test_float64_is_computed_in_float64_and_half_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for features in ({}, {"avx512_bf16": True}, {"amx_bf16": True}, {"avx512_fp16": True}):
        for capability in ((7, 5), (8, 0), (9, 0)):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda f=features: f)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
            bf16 = {
                "cpu": bool({"avx512_bf16", "amx_bf16"} & set(features)),
                "cuda": capability >= (8, 0),
                "mps": False,
            }
            for device, fast in bf16.items():
                expected = torch.bfloat16 if fast else torch.float32
                assert fast_dtype(torch.device(device), torch.float64) == torch.float64
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    assert fast_dtype(torch.device(device), dtype) == expected


@pytest.mark.parametrize(
    ("shape", "form", "dtype"),
    [
        ((8, 12), "auto", torch.float32),
        ((2, 12, 8), "gram", torch.float64),
    ],
)
def test_it_compiles_to_one_graph(shape: tuple[int, ...], form: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(newton_schulz, backend="eager", fullgraph=True)  # "eager" needs no C++ compiler
    for seed in range(2):
        matrices = gaussian(*shape, seed=seed).to(dtype)
        options: dict[str, Any] = {"form": form, "compute_dtype": "auto" if form == "auto" else dtype}
        assert distance(compiled(matrices, **options), newton_schulz(matrices, **options)) < 1e-5


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("variable", LIMITS)
@pytest.mark.parametrize(
    ("limit", "fast"),
    [
        ("SSE41", False), ("AVX", False), ("AVX2", False), ("avx2_vnni_2", False), ("AVX512_CORE", False),
        ("AVX512_CORE_VNNI", False), ("AVX512_CORE_BF16", True), ("AVX512_CORE_FP16", True),
        ("AVX512_CORE_AMX", True), ("AVX10_1_512", True), ("DEFAULT", True), ("all", True), ("", True),
    ],
)  # fmt: skip
def test_bf16_that_onednn_may_not_multiply_natively_is_not_fast(
    variable: str, limit: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "amx_bf16": True})
    monkeypatch.setenv(variable, limit)
    assert (fast_dtype(torch.device("cpu"), torch.float32) == torch.bfloat16) == fast
    if variable == LIMITS[1]:
        monkeypatch.setenv(LIMITS[0], "ALL")  # the newer name is asked first
        assert fast_dtype(torch.device("cpu"), torch.float32) == torch.bfloat16


@pytest.mark.parametrize("features", [{}, {"avx512_bf16": True}])
def test_auto_computes_in_the_fast_dtype(monkeypatch: pytest.MonkeyPatch, features: dict[str, bool]) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    for dtype in (torch.float64, torch.float32):
        matrix = gaussian(8, 12, dtype=dtype)
        fast = fast_dtype(matrix.device, dtype)
        assert torch.equal(newton_schulz(matrix), newton_schulz(matrix, compute_dtype=fast))


@pytest.mark.parametrize("compute", [torch.float32, torch.float64, torch.float16])
def test_autocast_does_not_choose_another_dtype_to_compute_in(compute: torch.dtype) -> None:
    matrix, batch = gaussian(8, 12), gaussian(3, 8, 12, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (matrix @ matrix.mT).dtype == torch.bfloat16
        found = [newton_schulz(m, compute_dtype=compute) for m in (matrix, batch)]
    for m, result in zip((matrix, batch), found, strict=True):
        assert torch.equal(result, newton_schulz(m, compute_dtype=compute))


# ---- Batches, zeros, NaN, empty shapes --------------------------------------------------------------------


@either_form
@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_is_a_loop(form: str, leading: tuple[int, ...], shape: tuple[int, int]) -> None:
    batch = gaussian(*leading, *shape)
    result = newton_schulz(batch, compute_dtype=torch.float32, form=form)
    for found, matrix in zip(result.reshape(-1, *shape), batch.reshape(-1, *shape), strict=True):
        alone = newton_schulz(matrix, compute_dtype=torch.float32, form=form)
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@either_form
@pytest.mark.parametrize("shape", [(320, 640), (640, 320)])
def test_a_large_matrix_comes_out_the_same_to_the_bit_whoever_is_with_it(form: str, shape: tuple[int, int]) -> None:
    stack = gaussian(3, *shape)
    assert not batching_pays(stack.shape[1:], stack.device)
    together = newton_schulz(stack, form=form)
    for found, matrix in zip(together, stack, strict=True):
        assert torch.equal(found, newton_schulz(matrix, form=form))


@either_form
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_a_zero_matrix_gives_zero_and_does_not_touch_its_batch(form: str, dtype: torch.dtype) -> None:
    batch = gaussian(3, 6, 4)
    alone = newton_schulz(batch, compute_dtype=dtype, form=form)
    batch[1] = 0
    result = newton_schulz(batch, compute_dtype=dtype, form=form)
    assert torch.equal(result[1], torch.zeros(6, 4))
    assert torch.equal(result[::2], alone[::2])
    assert torch.equal(newton_schulz(torch.zeros(4, 6), compute_dtype=dtype, form=form), torch.zeros(4, 6))


@either_form
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("steps", [0, 5])
def test_a_nan_or_infinity_spoils_its_own_matrix_and_no_other(
    form: str, poison: float, dtype: torch.dtype, steps: int
) -> None:
    batch = gaussian(3, 6, 4)
    clean = newton_schulz(batch, steps, compute_dtype=dtype, form=form)
    batch[1, 2, 3] = poison
    result = newton_schulz(batch, steps, compute_dtype=dtype, form=form)
    assert result[1].isnan().all()
    assert torch.equal(result[::2], clean[::2])
    assert newton_schulz(batch[1], steps, compute_dtype=dtype, form=form).isnan().all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 3, 4), (3, 0, 4), (2, 0, 3, 4)])
def test_empty_shapes_come_back_empty(shape: tuple[int, ...]) -> None:
    result = newton_schulz(torch.empty(shape, dtype=torch.bfloat16))
    assert (result.shape, result.dtype) == (shape, torch.bfloat16)


@either_form
@pytest.mark.parametrize("norm", ["safe", "torch"])
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_input_is_left_alone_and_the_result_is_new_and_contiguous(
    form: str, norm: str, steps: int, dtype: torch.dtype
) -> None:
    batch = gaussian(2, 6, 8, dtype=dtype)
    for view in (batch, batch.mT, batch[:, ::2], batch[..., 1:5], batch[0], batch[0].T):
        before = view.clone()
        result = newton_schulz(view, steps, compute_dtype=dtype, form=form, norm=norm)
        assert torch.equal(view, before)
        assert (result.dtype, result.shape, result.is_contiguous()) == (dtype, view.shape, True)
        assert result.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()


def test_no_steps_only_divide_by_the_frobenius_norm() -> None:
    matrix = gaussian(5, 7)
    torch.testing.assert_close(newton_schulz(matrix, steps=0, compute_dtype=torch.float32), matrix / matrix.norm())


def test_unit_frobenius_divides_every_matrix_in_place() -> None:
    for dtype in (torch.float32, torch.float64):
        stack = gaussian(3, 5, 7, dtype=dtype) * torch.tensor([1e-30, 1.0, 1e30], dtype=dtype).view(3, 1, 1)
        unit = unit_frobenius_(stack)
        assert unit is stack
        torch.testing.assert_close(torch.linalg.matrix_norm(unit), torch.ones(3, dtype=dtype))


@either_form
@pytest.mark.parametrize("shape", [*SHAPES, (3, 4, 6), (2, 3, 6, 4), (2, 400, 500), (0, 3)])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_in_place_gives_the_same_bits_in_the_same_memory(form: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices = gaussian(*shape, dtype=dtype)
    expected, memory = newton_schulz(matrices, form=form), matrices.data_ptr()
    found = newton_schulz_(matrices, form=form)
    assert found is matrices
    assert found.data_ptr() == memory
    assert torch.equal(found, expected)


# ---- The Gram form ----------------------------------------------------------------------------------------


@quick(60)
@given(
    sides,
    sides,
    seeds,
    st.integers(0, 8),
    st.sets(st.integers(-1, 9)),
    st.lists(st.tuples(st.integers(1, 4), st.integers(-4, 4), st.integers(-4, 4)), min_size=1, max_size=4),
)
def test_the_gram_form_is_the_standard_form_in_exact_arithmetic(
    rows: int, columns: int, seed: int, steps: int, restarts: set[int], polynomials: Any
) -> None:
    x = unit_frobenius_(gaussian(*sorted((rows, columns)), seed=seed, dtype=torch.float64))
    synthetic = quintics([(a, b / 8, c / 64) for a, b, c in polynomials], min(steps, 3))  # more of them leave float64
    for row in (quintics("muon", steps), quintics("polar_express", steps), CUBIC5[:steps], synthetic) if steps else ():
        wanted = newton_schulz(x, len(row), row, form="standard")
        for where in (None, restarts):
            for stack in (x, x.expand(2, *x.shape)):
                found = gram_iterate_(stack.clone(), row, where)
                assert (found - wanted).norm() <= 1e-6 * wanted.norm() + 1e-9  # what a vanishing z or e may cost


@pytest.mark.parametrize("shape", [(512, 600), (600, 512)])
def test_strips_and_mirrors_make_whole_products(shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape, dtype=torch.float64)
    assert len(strip_bounds(512, 600)) > 2
    found = newton_schulz(matrix, coefficients="polar_express", form="gram")
    assert distance(found, newton_schulz(matrix, coefficients="polar_express")) < 1e-12


# A zero of the polynomial, of what multiplies R, and of both: each at the mean eigenvalue of a matrix of equal ones
@pytest.mark.parametrize("quintic", [(1, -1, 0), (1, -2, 1), (1, 0, -1), (3, -2, 1), (0, 0, 0), (2, 0, 0), (0, 0, 1)])
@pytest.mark.parametrize("values", [(1, 1, 1, 1), (1.5, 1, 1, 0.5)])
def test_a_quintic_with_a_root_at_the_mean_divides_nothing_by_zero(quintic: Any, values: Any) -> None:
    spread = torch.tensor(values, dtype=torch.float64)
    x = with_singular_values(spread / spread.norm(), 4, 6, seed=1)
    a, b, c = quintic
    polynomials = [(a, b * 4, c * 16), (1.0, 0.5, 0.25)]  # the mean square is 1/4
    wanted = newton_schulz(x, 2, polynomials, form="standard")
    for found in (gram_iterate_(x.clone(), polynomials), gram_iterate_(x.clone()[None], polynomials)[0]):
        assert (found - wanted).norm() < 1e-5


HARDEST = ("all equal", "square Gaussian", "an outlier, 1000", "heavy tail", "rank 1")  # by margin, at m = 1024


@pytest.mark.parametrize(("shape", "names"), [((256, 512), None), ((512, 640), HARDEST)])
def test_in_bf16_the_gram_form_is_as_safe_as_the_standard_form(shape: tuple[int, int], names: Any) -> None:
    with WideProducts():
        rows = list(gram_errors([shape], names=names))
    assert len(rows) == 2 * len(names or spectra(shape[0])) >= 10
    assert [row for row in rows if not row.safe] == []


def test_in_bf16_a_batch_is_safe_too_though_it_rounds_once_more() -> None:
    with WideProducts():
        assert all(row.safe for row in gram_errors([(128, 320)], batched=True))


def test_in_bf16_1024_rows_are_safe_on_the_hardest_spectra() -> None:
    with WideProducts():
        assert all(row.safe for row in gram_errors([(1024, 1536)], ["polar_express"], names=HARDEST))


@pytest.mark.parametrize("restarts", [(), (2,)])
def test_fewer_restarts_are_not_safe(restarts: tuple[int, ...]) -> None:
    with WideProducts():
        assert sum(not row.safe for row in gram_errors([(128, 256)], restarts=restarts)) > 20


def test_one_workspace_serves_matrix_after_matrix_and_changes_no_bit() -> None:
    polynomials, first, second = quintics("muon", 5), *(unit_frobenius_(gaussian(20, 30, seed=seed)) for seed in (0, 1))
    work = GramWorkspace(first)
    for x in (first, second, first):
        alone = gram_iterate_(x.clone(), polynomials)
        assert torch.equal(gram_iterate_(x.clone(), polynomials, workspace=work), alone)
        assert len(work.squares) == 3


@pytest.fixture
def no_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN documents for leaving AMX alone."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.mark.usefixtures("no_matrix_unit")
def test_the_fast_form_is_gram_where_it_saves_more_operations_than_it_costs_starts() -> None:
    cpu, gpu, bf16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
    for shape in ((1024, 4096), (4096, 1024), (512, 1024), (256, 4096)):
        assert fast_form(shape, FIVE, bf16, cpu) == fast_form(shape, FIVE, torch.float32, cpu) == "gram"
        assert fast_form(shape, FIVE, torch.float64, cpu) == fast_form(shape, FIVE, torch.float16, cpu) == "standard"
        assert fast_form(shape, FIVE, bf16, gpu) == "standard"  # measured
    for shape in ((1024, 1024), (255, 9999), (256, 1024), (2048, 2048), (12, 20)):
        assert fast_form(shape, FIVE, bf16, cpu) == "standard"
    assert fast_form((1024, 4096), [], bf16, cpu) == "standard"


@pytest.mark.usefixtures("no_matrix_unit")
def test_a_schedule_that_is_too_steep_for_the_gram_form_in_bf16_stays_standard() -> None:
    cpu = torch.device("cpu")
    for name, form in {"polar_express": "gram", "cubic5": "gram", "cans": "standard"}.items():
        assert fast_form((1024, 4096), quintics(name, 5), torch.bfloat16, cpu) == form
        assert fast_form((1024, 4096), quintics(name, 5), torch.float32, cpu) == "gram"


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_what_auto_takes_in_bf16_is_safe_on_every_spectrum(name: str) -> None:
    steps = len(COEFFICIENTS[name]) if name in AS_A_WHOLE else 5
    unsafe = [row.spectrum for row in gram_errors([(128, 256)], [name], steps=steps) if not row.safe]
    assert bool(unsafe) == any(slope > STEEPEST for slope, _, _ in quintics(name, steps)), unsafe


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("restarts", [None, {1}, {1, 2, 3, 4}], ids=str)
@pytest.mark.parametrize("shape", [(24, 40), (3, 12, 12)], ids=str)
def test_the_gram_form_for_float16_applies_the_same_quintics(
    name: str, restarts: set[int] | None, shape: tuple[int, ...]
) -> None:
    polynomials = quintics(name, len(COEFFICIENTS[name]) if name in AS_A_WHOLE else 5)
    x = unit_frobenius_(gaussian(*shape).double())
    assert distance(half_gram_iterate(HALF_SCALE * x, polynomials, restarts), _iterate(x, polynomials)) < 1e-6


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_in_float16_the_gram_form_is_safe_on_every_spectrum_and_in_bfloat16_it_is_not(name: str) -> None:
    """Not centred, it needs float16's digits."""
    m, n = 96, 192
    polynomials = quintics(name, len(COEFFICIENTS[name]) if name in AS_A_WHOLE else 5)
    u, v = (torch.linalg.qr(gaussian(k, m).double()).Q for k in (m, n))
    unsafe: dict[torch.dtype, list[str]] = {torch.float16: [], torch.bfloat16: []}
    for spectrum, values in spectra(m).items():
        exact = values / values.norm()
        x = ((u * exact) @ v.mT).float()
        for a, b, c in polynomials:
            exact = a * exact + b * exact**3 + c * exact**5
        wanted = (u * exact) @ v.mT
        bound = max(1.5 * float((_iterate(x.bfloat16(), polynomials) - wanted).norm() / exact.norm()), 0.03)
        for dtype, failed in unsafe.items():
            found = half_gram_iterate((HALF_SCALE * x).to(dtype), polynomials)
            if not (found - wanted).norm() / exact.norm() <= bound:
                failed.append(spectrum)
    assert not unsafe[torch.float16]
    assert unsafe[torch.bfloat16]


def test_in_float16_the_gram_form_does_not_lose_the_quiet_entries_of_a_large_matrix() -> None:
    """An entry of 1e-7 or less is nothing in float16, and a millionth of a matrix whose norm is 1."""
    x = torch.cat([gaussian(1, 4096), 1e-4 * gaussian(15, 4096)])
    wanted = newton_schulz(x.double(), compute_dtype=torch.float64, form="standard")
    found = newton_schulz(x, compute_dtype=torch.float16, form="gram").double()
    assert (found - wanted).norm() < 0.01 * wanted.norm()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return torch.device("cuda")


def test_a_hopper_gpu_takes_float16_where_that_saves_a_fifth_of_the_operations(hopper: torch.device) -> None:
    for shape in ((1024, 4096), (4096, 1024), (4096, 4096), (4096, 11008), (24, 1024, 4096)):
        assert half_gram_pays(shape, FIVE, hopper)
    for shape in ((1024, 1024), (1024, 2048), (2048, 2048), (512, 4096), (24, 1024, 1024), (2048, 5632)):
        assert not half_gram_pays(shape, FIVE, hopper)
    assert half_gram_pays((4096, 11008), quintics("polar_express", 5), hopper)
    assert not half_gram_pays((4096, 11008), quintics("cans", 5), hopper)  # too steep
    assert not half_gram_pays((1024, 4096), [], hopper)
    assert not half_gram_pays((1024, 4096), FIVE, torch.device("cpu"))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (10, 0)])
def test_a_gpu_that_nobody_measured_keeps_to_bfloat16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert not half_gram_pays((4096, 11008), FIVE, torch.device("cuda"))


def test_auto_takes_float16_for_those_alone_who_leave_everything_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "half_gram_pays", lambda *shape: True)
    monkeypatch.setattr(module, "fast_dtype", lambda device, dtype: torch.bfloat16)
    m = gaussian(12, 40)
    half = newton_schulz(m, compute_dtype=torch.float16, form="gram")
    assert torch.equal(newton_schulz(m), half)
    assert torch.equal(newton_schulz(m, form="gram"), half)
    narrow = newton_schulz(m, compute_dtype=torch.bfloat16)
    assert torch.equal(newton_schulz(m, form="standard"), narrow)
    assert torch.equal(newton_schulz(m, norm="torch"), newton_schulz(m, compute_dtype=torch.bfloat16, norm="torch"))


def test_a_gpu_without_triton_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_module, "is_hopper", lambda device: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    gram_module.has_kernel.cache_clear()
    with pytest.warns(UserWarning, match="without its own kernel"):
        assert not gram_module.has_kernel(torch.device("cpu"))
    gram_module.has_kernel.cache_clear()


@pytest.mark.usefixtures("unlimited")
def test_with_a_matrix_unit_the_gram_form_has_to_save_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    for allowed in ("ALL", "default", "AVX512_CORE_AMX", "AVX10_1_512_AMX_FP16"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
        for shape in ((512, 1024), (512, 2048), (1024, 2048), (256, 4096)):
            assert fast_form(shape, FIVE, bf16, cpu) == "standard"
            assert fast_form(shape, FIVE, torch.float32, cpu) == "gram"  # the unit is for bf16
        for shape in ((512, 8192), (1024, 8192), (2048, 4096)):
            assert fast_form(shape, FIVE, bf16, cpu) == "gram"
    for forbidden in ("AVX2", "AVX512_CORE_BF16"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", forbidden)
        assert fast_form((512, 2048), FIVE, bf16, cpu) == "gram"


@pytest.mark.parametrize("shape", [(512, 2048), (256, 256)])
def test_auto_takes_the_fast_form(shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape)
    form = fast_form(shape, FIVE, fast_dtype(matrix.device, matrix.dtype), matrix.device)
    assert torch.equal(newton_schulz(matrix), newton_schulz(matrix, form=form))


# ---- Torch's norm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (24, 100), (97, 65), (80, 80)])
def test_torchs_order_of_cast_and_norm_gives_torchs_bits(shape: tuple[int, int]) -> None:
    for magnitude in (1e-9, 1e-3, 1.0, 1e5):
        matrix = gaussian(*shape) * magnitude
        found = newton_schulz(matrix, compute_dtype=torch.bfloat16, form="standard", norm="torch")
        assert torch.equal(found, _zeropower_via_newtonschulz(matrix, MUON, 5, 1e-7).float())


def test_torchs_norm_divides_in_place_at_any_stride() -> None:
    block = gaussian(2, 3, 8, 6).transpose(0, 1)
    expected = newton_schulz(block, compute_dtype=torch.float32, norm="torch")
    torch.testing.assert_close(newton_schulz_(block, compute_dtype=torch.float32, norm="torch"), expected)


# ---- Coefficients and errors ------------------------------------------------------------------------------


def test_quintics_by_name_or_number_fill_every_step() -> None:
    first, second = (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    integers: Any = [[1, 2, 3], [4, 5, 6]]
    assert quintics("muon", 3) == [(3.4445, -4.7750, 2.0315)] * 3
    assert quintics(first, 2) == quintics(integers[0], 2) == quintics([first], 2) == [first, first]
    assert quintics([first, second], 4) == quintics(integers, 4) == [first, second, second, second]
    assert quintics([first, second], 1) == [first]
    assert quintics("muon", 0) == quintics("polar_express", 0) == quintics(first, 0) == []
    assert all(type(value) is float for value in quintics(integers[0], 1)[0])


def test_polar_express_is_scaled_for_safety_and_then_polishes() -> None:
    polynomials = quintics("polar_express", 10)
    assert len(polynomials) == 10
    assert polynomials[7:] == [POLAR_EXPRESS[-1]] * 3 == [CLASSIC] * 3
    s = torch.linspace(0.1, 1, 5, dtype=torch.float64)
    torch.testing.assert_close(compose(polynomials[:1], s), compose([POLAR_EXPRESS[0]], s / 1.01))
    assert quintics("polar_express", 3) == polynomials[:3]


MATRIX = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("matrix", "options", "says"),
    [
        (torch.ones(5), {}, r"needs matrices.*\(5,\)"),
        (torch.ones(()), {}, r"needs matrices.*\(\)"),
        (MATRIX.long(), {}, "torch.int64"),
        (MATRIX.to(torch.complex64), {}, "torch.complex64"),
        (MATRIX, {"compute_dtype": "bf16"}, "compute_dtype is 'bf16'"),
        (MATRIX, {"compute_dtype": torch.float8_e4m3fn}, "compute_dtype is torch.float8_e4m3fn"),
        (MATRIX, {"form": "grams"}, "'grams'; choose one of"),
        (MATRIX, {"norm": None}, "None; choose one of"),
        (MATRIX, {"coefficients": "moun"}, "'moun'"),
        (MATRIX, {"coefficients": ()}, r"\(\)"),
        (MATRIX, {"coefficients": (1.0, 2.0)}, "exactly three"),
        (MATRIX, {"coefficients": ((1.0, 2.0, 3.0), (1.0, 2.0))}, "exactly three"),
        (MATRIX, {"steps": -1}, "-1"),
        (MATRIX, {"coefficients": "deepseek_v4", "steps": 5}, "10"),
        (MATRIX, {"coefficients": "cubic5", "steps": 4}, "5 steps"),
    ],
)
def test_what_it_cannot_take_is_refused_by_value(matrix: Tensor, options: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says) as error:
        newton_schulz(matrix, **options)
    message(error)


# ---- Cost and diagnostics ---------------------------------------------------------------------------------


@either_form
@pytest.mark.parametrize("shape", [*SHAPES, LARGE_FOR_GRAM])
@pytest.mark.parametrize(("steps", "coefficients"), [(0, "muon"), (1, "muon"), (2, "muon"), (5, "muon"), (5, "cubic5")])
def test_the_flop_formula_counts_exactly_what_torch_counts(
    form: str, shape: tuple[int, int], steps: int, coefficients: str
) -> None:
    for batch in (1, 3) if math.prod(shape) < 1000 else (1,):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(gaussian(batch, *shape), steps, coefficients, compute_dtype=torch.float32, form=form)
        assert counter.get_total_flops() == batch * flops(shape, steps, form, coefficients=coefficients)


def test_diagnostics_know_a_rotated_stretch() -> None:
    for shape in ((5, 5), (5, 9), (9, 5)):
        assert orthogonality_error(2 * torch.eye(*shape)) == pytest.approx(3.0)
    q = orthogonal(6, seed=1)
    stretch = with_singular_values(torch.tensor([3.0, 2.0, 1.0, 1.0, 0.5, 0.5]).double(), 6, 6, seed=5)
    matrix = q @ (stretch @ stretch.T)  # polar decomposition: a rotation times a symmetric positive matrix
    assert distance(polar_factor(matrix), q) < 1e-10
    assert cosine_to_polar(matrix, 7 * q) == pytest.approx(1.0)
    assert cosine_to_polar(matrix, -q) == pytest.approx(-1.0)


@pytest.mark.parametrize("shape", [(7, 3), (3, 7)])
def test_diagnostics_take_batches_of_tall_and_wide_matrices(shape: tuple[int, int]) -> None:
    batch = gaussian(4, *shape)
    polar = polar_factor(batch)
    assert singular_values(batch).shape == (4, 3)
    assert polar.dtype == orthogonality_error(batch).dtype == torch.float64
    torch.testing.assert_close(orthogonality_error(polar), torch.zeros(4).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(cosine_to_polar(batch, polar), torch.ones(4).double())
