"""Newton–Schulz: the nearest semi-orthogonal matrix, found with matrix products alone.

For M = U S V^T the polar factor is U V^T: the same singular directions, every singular value 1. One iteration
of an odd quintic acts on each singular value s as p(s) = a s + b s^3 + c s^5 and needs no decomposition:

    A = X X^T,    X <- a X + (b A + c A^2) X

With c = 0 it is a cubic, and A^2 is not needed: two products in place of three. `coefficients` has the published
numbers. Wide and large matrices go through the same iteration in another form, which is faster: `gram`.

Source: Muon (Jordan et al. 2024); Moonlight (Liu et al. 2025, section 2.1) for running it in bf16.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from distmuon.optim.coefficients import Coefficients, Quintic, quintics
from distmuon.optim.gram import (
    HALF_SCALE,
    KERNEL_FROM,
    GramWorkspace,
    gram_iterate_,
    gram_work,
    half_gram_iterate,
    half_gram_work,
    is_hopper,
)
from distmuon.sharding.precision import exactly

ComputeDtype = torch.dtype | Literal["auto"]
Form = Literal["auto", "standard", "gram"]
Norm = Literal["safe", "torch"]

BATCHED_ON_CPU, BATCHED_ON_GPU = 2**17, 2**22  # elements: see `batching_pays`
BATCH = 2**25  # elements in one batch at most: more of them gain no time, and take memory

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # in which Newton–Schulz computes
FORMS, NORMS = get_args(Form), get_args(Norm)

# How many floating-point operations take as long as starting one kernel, fitted to two CPUs. A matrix unit makes only
# products faster, so a start is worth more of them.
START = {"cpu": 2e7, "matrix unit": 2e8}

STEEPEST = 8.25  # slope at 0 of a quintic that the Gram forms bear in half precision; CANS's 8.47 fails on some spectra

TORCH_EPS = 1e-7  # below it torch.optim.Muon divides no norm out


def fast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that "auto" computes in, for an input of `dtype` on `device`.

    float64 stays float64, because whoever asks for it wants the digits. Everything else is
    computed in bf16 where the hardware multiplies bf16 natively (a GPU since Ampere; a CPU
    with AVX512-BF16 or AMX, and oneDNN permitted to use it), and in fp32 elsewhere: emulated bf16
    is slower than fp32. fp16 is chosen for the Gram form alone, on GPUs: see `half_gram_pays`.
    """
    if dtype == torch.float64:
        return torch.float64
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    elif device.type == "cpu":
        fast = _may_use("avx512_bf16", "BF16", "FP16", "AMX", "AVX10") or has_matrix_unit()
    else:
        fast = False
    return torch.bfloat16 if fast else torch.float32


def newton_schulz(
    matrices: Tensor,  # [..., A, B]
    steps: int = 5,
    coefficients: Coefficients = "muon",
    compute_dtype: torch.dtype | str = "auto",
    form: str = "auto",
    norm: str = "safe",
) -> Tensor:  # [..., A, B]
    """Orthogonalize one matrix, or a batch of them: return about U V^T for each M = U S V^T.

    matrices: [..., A, B], real floating point; all leading dimensions are batch. Any of them may be 0.
    steps: iterations; five of "muon" leave singular values in about 0.7 to 1.2, but for those that were less than a
        thousandth of the matrix's norm, which stay smaller.
    coefficients: see `quintics`.
    compute_dtype: "auto" (see `fast_dtype`) or a floating dtype.
    form: "standard", as above; "gram", its Gram form (see `gram`), equal up to rounding, centred unless it is computed
        in float16; "auto", whichever is faster (see `fast_form`, and for GPUs `half_gram_pays`).
    norm: "safe", taken in the input's dtype or float32, whichever is wider, before the cast. "torch", as
        torch.optim.Muon does it: the cast first, then a norm in that dtype and of at least 1e-7. With it, with
        bfloat16, form="standard" and one matrix at a time, the result is torch's to the bit. It is not the default:
        casting first overflows (float16 ends at 65504) or rounds small entries to zero, a norm in bfloat16 is off by
        up to 0.4 %, and below 1e-7 the result shrinks with the input.

    Returns a tensor of the same shape, dtype and device. The result does not depend on the scale of the input, from
    1e-30 to 1e30. A zero matrix gives zero. A matrix with a NaN or an infinity gives NaN everywhere in that matrix
    and leaves the rest of its batch untouched: callers that want an error check their gradients, once, beforehand.
    Raises ValueError for fewer than two dimensions, TypeError for integers and complex numbers, of the matrices or as
    compute_dtype.
    """
    return newton_schulz_(
        matrices.clone(memory_format=torch.contiguous_format), steps, coefficients, compute_dtype, form, norm
    )


def newton_schulz_(
    matrices: Tensor,  # [..., A, B]; overwritten
    steps: int = 5,
    coefficients: Coefficients = "muon",
    compute_dtype: torch.dtype | str = "auto",
    form: str = "auto",
    norm: str = "safe",
) -> Tensor:  # [..., A, B], the same tensor
    """Orthogonalize in place, for who needs the input no more. See `newton_schulz`."""
    if matrices.ndim < 2:
        shape = tuple(matrices.shape)
        raise ValueError(f"Newton–Schulz needs matrices, got a tensor of shape {shape}.")
    if not matrices.is_floating_point():
        given = matrices.dtype
        raise TypeError(f"Newton–Schulz needs real floating-point matrices, got {given}.")
    schedule = quintics(coefficients, steps)
    if matrices.numel() == 0:
        return matrices
    dtype = compute_dtype
    if compute_dtype == "auto":
        dtype = fast_dtype(matrices.device, matrices.dtype)
        free = dtype == torch.bfloat16 and form != "standard" and norm == "safe"
        if free and half_gram_pays(matrices.shape, schedule, matrices.device):
            form, dtype = "gram", torch.float16
    if dtype not in COMPUTE_DTYPES:
        known = "'auto' or one of " + ", ".join(map(str, COMPUTE_DTYPES))
        raise TypeError(f"compute_dtype is {compute_dtype!r}; give {known}.")

    if form == "auto":
        form = fast_form(matrices.shape[-2:], schedule, dtype, matrices.device)
    check_form(form, norm)
    half = form == "gram" and dtype == torch.float16

    # X_0 = M / ||M||_F, so that every singular value is at most 1
    if norm == "torch":
        x = _torchs_norm_(matrices.to(dtype))
        x = x.mul_(HALF_SCALE) if half else x
    elif matrices.is_cuda and not torch.compiler.is_compiling():  # without a copy in float32, to spare its memory
        x = matrices.float() if matrices.dtype == torch.float16 else matrices
        factors = reciprocal_norms_(x).mul_(HALF_SCALE if half else 1.0)
        x = torch.mul(x, factors, out=torch.empty_like(x, dtype=dtype if schedule else x.dtype))
    else:
        x = unit_frobenius_(matrices.to(torch.promote_types(matrices.dtype, torch.float32)))
        x = x.mul_(HALF_SCALE) if half else x
        x = x.to(dtype) if schedule else x
    if not schedule:
        return matrices.copy_(x)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # [..., a, b], a <= b: X X^T is the smaller Gram matrix
    x = x.reshape(-1, *x.shape[-2:])  # [n, a, b]
    iterate = half_gram_iterate if half else _iterate
    if form == "gram" and not half:
        x = _iterate_gram_(x, schedule)
        if not torch.compiler.is_compiling() and x.data_ptr() == matrices.data_ptr():  # the same dtype, so in place
            return matrices
    elif len(x) == 1:
        x = iterate(x[0], schedule)
    elif batching_pays(x.shape[1:], x.device):
        x = iterate(x, schedule)
    else:
        x = torch.stack([iterate(one, schedule) for one in x])
    # copied twice, and yet faster than one copy across both strides and dtypes
    x = x.mT.contiguous() if tall else x
    return matrices.copy_(x.view(matrices.shape))


def fast_form(shape: Sequence[int], schedule: Sequence[Quintic], dtype: torch.dtype, device: torch.device) -> str:
    """Return the form that "auto" takes for matrices of `shape` [A, B]: the one that costs less, by a simple model.

    An operation costs 1, and the start of a product, or of anything between two, `START`: the Gram form has fewer of
    the former and more of the latter, which cost most where products are fast. float64 stays standard, because those
    who ask for it want the digits, and so do squares and small sides, where little can be gained, and schedules that
    are too steep for the Gram form in bf16. On a GPU the centred form gained nothing at any shape that
    `tests/gpu/one_gpu.py` has measured; the one in float16 did, see `half_gram_pays`.
    """
    a, b = min(shape), max(shape)
    if dtype == torch.bfloat16 and _too_steep(schedule):
        return "standard"
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32) or a < 256 or a == b:
        return "standard"
    start = START["matrix unit" if dtype == torch.bfloat16 and has_matrix_unit() else "cpu"]
    gram, calls = gram_work(a, b, schedule)
    standard, products = _standard_work(a, b, schedule)
    return "gram" if gram + start * calls < standard + start * products else "standard"


def half_gram_pays(shape: Sequence[int], schedule: Sequence[Quintic], device: torch.device) -> bool:
    """Return whether "auto" computes matrices of `shape` [..., A, B] in the Gram form and float16, instead of bf16.

    On GPUs on which that was measured, and where its operations alone should take less than 0.8 of the time. They take
    longer than it takes to start them where our kernel pays, or where matrices are small enough to come in batches;
    between the two, starts decide, and the standard form has fewer. It depends on the shape of one matrix and not on
    how many there are, so that all ranks do the same to all matrices.
    """
    a, b = sorted(shape[-2:])
    if a < 1024 or not schedule or _too_steep(schedule) or not is_hopper(device):
        return False
    if a * b > BATCHED_ON_GPU and a * a * b < KERNEL_FROM:
        return False
    return half_gram_work(a, b, schedule) < 0.8 * _standard_work(a, b, schedule)[0]


def _too_steep(schedule: Sequence[Quintic]) -> bool:
    return any(slope > STEEPEST for slope, _, _ in schedule)


def has_matrix_unit() -> bool:
    """Return whether this CPU multiplies bf16 matrices in a unit of their own (AMX), and oneDNN may use it."""
    return _may_use("amx_bf16", "AMX")


def _may_use(feature: str, *permitting: str) -> bool:
    """Return whether this CPU has a feature, and oneDNN, which multiplies bf16 for torch, may use it.

    permitting: parts of the names of those limits (ONEDNN_MAX_CPU_ISA, formerly DNNL_MAX_CPU_ISA) that permit it.
    """
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL").upper()
    permitted = limit in ("ALL", "DEFAULT") or any(part in limit for part in permitting)
    return permitted and bool(torch.cpu.get_capabilities().get(feature))


# What torch.compiler.assume_constant_result sets, without the second that importing the compiler takes.
_may_use._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_form(form: str, norm: str) -> None:
    """Raise ValueError, naming what is allowed, for a form or norm that does not exist."""
    if form not in FORMS:
        raise ValueError(f"the form of Newton–Schulz is {form!r}; choose one of {', '.join(FORMS)}.")
    if norm not in NORMS:
        raise ValueError(f"the norm before Newton–Schulz is {norm!r}; choose one of {', '.join(NORMS)}.")


def batching_pays(shape: Sequence[int], device: torch.device) -> bool:
    """Return whether several matrices of this shape [A, B] run faster as one batched product than one after the other.

    Small products are dominated by the cost of launching them. Large ones gain nothing, and stacking them is a copy:
    on one H200 batches took 0.2 of the time at 1024 x 1024, 0.6 at 1024 x 4096, and 0.95 at 4096 x 4096.
    """
    return math.prod(shape) <= (BATCHED_ON_GPU if device.type == "cuda" else BATCHED_ON_CPU)


def _iterate(
    x: Tensor,  # [a, b] or [n, a, b], a <= b
    schedule: Sequence[Quintic],
) -> Tensor:  # as x
    """Apply the quintics to one matrix or a batch."""
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    with torch.autocast(x.device.type, enabled=False):  # it would choose the dtype for us
        for a, b, c in schedule:
            # A = X X^T                     [n, a, a]
            gram = x @ x.mT
            if not c:
                # X <- a X + b A X          [n, a, b]
                x = multiply_add(x, gram, x, beta=a, alpha=b)
                continue
            # b A + c A^2                   [n, a, a]
            polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
            # X <- a X + (b A + c A^2) X    [n, a, b]
            x = multiply_add(x, polynomial, x, beta=a)
    return x


def _iterate_gram_(
    x: Tensor,  # [n, a, b], a <= b; overwritten
    schedule: Sequence[Quintic],
) -> Tensor:  # the same tensor
    """Apply the quintics in the Gram form: a batch at once where that pays, else each in the memory of the last."""
    if torch.compiler.is_compiling():  # batched, because that reads no number; contiguous, because of `out=`
        return gram_iterate_(x.contiguous(), schedule)
    if x.is_cuda or (len(x) > 1 and batching_pays(x.shape[1:], x.device)):
        return gram_iterate_(x, schedule)
    work = GramWorkspace(x[0])
    for one in x:
        gram_iterate_(one, schedule, workspace=work)
    return x


def _torchs_norm_(
    x: Tensor,  # [..., A, B], in the dtype to compute in; overwritten
) -> Tensor:  # as x
    """Divide each matrix by its norm the way torch.optim.Muon does: in the dtype that it computes in."""
    stack = x.reshape(-1, *x.shape[-2:])  # a copy, if the strides are odd
    for one in stack:
        one.div_(one.norm().clamp(min=TORCH_EPS))
    return stack.view(x.shape)


def unit_frobenius_(
    x: Tensor,  # [..., A, B], float32 or wider, not empty; overwritten
) -> Tensor:  # [..., A, B], the same tensor
    """Divide each matrix by its Frobenius norm, in place, safe at any scale. Zero stays zero, infinity becomes NaN."""
    return x.mul_(reciprocal_norms_(x))


def reciprocal_norms_(
    x: Tensor,  # [..., A, B], not empty, not float16; may be multiplied by powers of two
) -> Tensor:  # [..., 1, 1], float32 or wider
    """Return what to multiply each matrix by, so that its Frobenius norm is 1.

    Zero stays zero, infinity becomes NaN. The squares of 1e-30 are below the smallest float32, and
    an epsilon in their place would make the result depend on the scale. So the largest entry's
    power of two is divided out first, which rounds nothing. On a CPU that is left out where it is
    not needed; on a GPU looking would stall the stream, and neither a FakeTensor nor a compiler's
    graph has numbers.
    """
    both, wide = (-2, -1), torch.promote_types(x.dtype, torch.float32)
    tiny = torch.finfo(wide).tiny
    if not (x.is_cuda or torch.compiler.is_compiling() or isinstance(x, FakeTensor)):
        norm = torch.linalg.vector_norm(x, dim=both, keepdim=True)
        if all(1e-15 < one < 1e15 for one in norm.flatten().tolist()):
            return 1 / norm
    largest = torch.linalg.vector_norm(x, math.inf, dim=both, keepdim=True, dtype=wide)
    mantissa, _ = torch.frexp(largest)
    # their quotient is a power of two; NaN for an infinity, 0 for zero
    x.mul_(mantissa / largest.clamp_(min=tiny))
    norm = torch.linalg.vector_norm(x, dim=both, keepdim=True, dtype=wide)
    return norm.clamp_(min=tiny).reciprocal_()


def flops(
    shape: Sequence[int],
    steps: int = 5,
    form: str = "standard",
    device: str = "cpu",
    coefficients: Coefficients = "muon",
) -> int:
    """Return the floating-point operations of one matrix of `shape` [A, B], a <= b.

    "standard": per step 4 a^2 b, and 2 a^3 unless it is a cubic. "gram": see `gram_work`; of five quintics
    16 a^2 b + 16 a^3 on a GPU, and about 12 a^2 b + 10 a^3 on a CPU, which makes large symmetric products in strips.
    """
    a, b = sorted(shape)
    schedule = quintics(coefficients, steps)
    if form == "gram":
        return gram_work(a, b, schedule, whole=device != "cpu")[0]
    return _standard_work(a, b, schedule)[0]


def _standard_work(a: int, b: int, schedule: Sequence[Quintic]) -> tuple[int, int]:
    """Return the floating-point operations of the standard form for one [a, b], a <= b, and how many products."""
    squares = sum(c != 0 for _, _, c in schedule)
    return len(schedule) * 4 * a * a * b + squares * 2 * a**3, 2 * len(schedule) + squares


# ---- Diagnostics: slow, exact, for looking ----------------------------------------------------------------


def singular_values(
    matrices: Tensor,  # [..., A, B]
) -> Tensor:  # [..., min(A, B)], float64
    """Return the singular values, largest first."""
    return torch.linalg.svdvals(exactly(matrices))


def orthogonality_error(
    matrices: Tensor,  # X, [..., A, B]
) -> Tensor:  # [...], float64
    """Return ||X X^T - I||_F / sqrt(min(A, B)), rows and columns swapped if X is tall."""
    x = exactly(matrices)
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    identity = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
    return torch.linalg.matrix_norm(x @ x.mT - identity) / max(x.shape[-2], 1) ** 0.5


def polar_factor(
    matrices: Tensor,  # U S V^T, [..., A, B]
) -> Tensor:  # U V^T, [..., A, B], float64
    """Return the polar factor by a decomposition: what Newton–Schulz approximates.

    Singular values below 1e-9 of the largest stay 0, because their directions are chance: a
    row of zeros gives one.
    """
    u, s, vt = torch.linalg.svd(exactly(matrices), full_matrices=False)
    spoken = s > 1e-9 * s[..., :1]
    return (u * spoken[..., None, :]) @ vt


def cosine_to_polar(
    matrices: Tensor,  # [..., A, B]
    orthogonalized: Tensor,  # [..., A, B]
) -> Tensor:  # [...], float64
    """Return the cosine between `orthogonalized` and the exact polar factor of `matrices`."""
    exact, found = polar_factor(matrices), exactly(orthogonalized)
    norms = torch.linalg.matrix_norm(exact) * torch.linalg.matrix_norm(found)
    return (exact * found).sum(dim=(-2, -1)) / norms
