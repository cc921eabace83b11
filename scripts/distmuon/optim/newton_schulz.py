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
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from distmuon.optim.coefficients import Coefficients, Quintic, quintics
from distmuon.optim.fast_paths import batching_pays, fast_dtype, fast_form, half_gram_pays, standard_work
from distmuon.optim.gram import HALF_SCALE, GramWorkspace, gram_iterate_, gram_work, half_gram_iterate
from distmuon.sharding.precision import exactly

ComputeDtype = torch.dtype | Literal["auto"]
Form = Literal["auto", "standard", "gram"]
Norm = Literal["safe", "torch"]

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # in which Newton–Schulz computes
FORMS, NORMS = get_args(Form), get_args(Norm)

TORCH_EPS = 1e-7  # below it torch.optim.Muon divides no norm out


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
    steps: iterations; five of "muon" leave singular values in about 0.7 to 1.2, but for those that were less than
        0.0015 of the matrix's Frobenius norm, which stay smaller.
    coefficients: see `quintics`.
    compute_dtype: "auto" (see `fast_dtype`) or a floating dtype.
    form: "standard", three products in an iteration; "gram", its Gram form (see `gram`), equal up to rounding, centred
        unless it is computed in float16; "auto", whichever is faster (see `fast_form`, and for GPUs `half_gram_pays`).
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
    polynomials = quintics(coefficients, steps)
    if matrices.numel() == 0:
        return matrices
    dtype = compute_dtype
    if compute_dtype == "auto":
        dtype = fast_dtype(matrices.device, matrices.dtype)
        free = dtype == torch.bfloat16 and form != "standard" and norm == "safe"
        if free and half_gram_pays(matrices.shape, polynomials, matrices.device):
            form, dtype = "gram", torch.float16
    if dtype not in COMPUTE_DTYPES:
        known = "'auto' or one of " + ", ".join(map(str, COMPUTE_DTYPES))
        raise TypeError(f"compute_dtype is {compute_dtype!r}; give {known}.")

    if form == "auto":
        form = fast_form(matrices.shape[-2:], polynomials, dtype, matrices.device)
    check_form(form, norm)
    half = form == "gram" and dtype == torch.float16

    # X_0 = M / ||M||_F, so that every singular value is at most 1
    if norm == "torch":
        x = _torchs_norm_(matrices.to(dtype))
        x = x.mul_(HALF_SCALE) if half else x
    elif matrices.is_cuda and not torch.compiler.is_compiling():  # without a copy in float32, to spare its memory
        x = matrices.float() if matrices.dtype == torch.float16 else matrices
        factors = reciprocal_norms_(x).mul_(HALF_SCALE if half else 1.0)
        x = torch.mul(x, factors, out=torch.empty_like(x, dtype=dtype if polynomials else x.dtype))
    else:
        x = unit_frobenius_(matrices.to(torch.promote_types(matrices.dtype, torch.float32)))
        x = x.mul_(HALF_SCALE) if half else x
        x = x.to(dtype) if polynomials else x
    if not polynomials:
        return matrices.copy_(x)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # [..., a, b], a <= b: X X^T is the smaller Gram matrix
    x = x.reshape(-1, *x.shape[-2:])  # [n, a, b]
    iterate = half_gram_iterate if half else _iterate
    if form == "gram" and not half:
        x = _iterate_gram_(x, polynomials)
        if not torch.compiler.is_compiling() and x.data_ptr() == matrices.data_ptr():  # the same dtype, so in place
            return matrices
    elif len(x) == 1:
        x = iterate(x[0], polynomials)
    elif batching_pays(x.shape[1:], x.device):
        x = iterate(x, polynomials)
    else:
        x = torch.stack([iterate(one, polynomials) for one in x])
    # copied twice, and yet faster than one copy across both strides and dtypes
    x = x.mT.contiguous() if tall else x
    return matrices.copy_(x.view(matrices.shape))


def check_form(form: str, norm: str) -> None:
    """Raise ValueError, naming what is allowed, for a form or norm that does not exist."""
    if form not in FORMS:
        raise ValueError(f"the form of Newton–Schulz is {form!r}; choose one of {', '.join(FORMS)}.")
    if norm not in NORMS:
        raise ValueError(f"the norm before Newton–Schulz is {norm!r}; choose one of {', '.join(NORMS)}.")


def _iterate(
    x: Tensor,  # [a, b] or [n, a, b], a <= b
    polynomials: Sequence[Quintic],
) -> Tensor:  # as x
    """Apply the quintics to one matrix or a batch."""
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    with torch.autocast(x.device.type, enabled=False):  # it would choose the dtype for us
        for a, b, c in polynomials:
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
    polynomials: Sequence[Quintic],
) -> Tensor:  # the same tensor
    """Apply the quintics in the Gram form: a batch at once where that pays, else each in the memory of the last."""
    if torch.compiler.is_compiling():  # batched, because that reads no number; contiguous, because of `out=`
        return gram_iterate_(x.contiguous(), polynomials)
    if x.is_cuda or (len(x) > 1 and batching_pays(x.shape[1:], x.device)):
        return gram_iterate_(x, polynomials)
    work = GramWorkspace(x[0])
    for one in x:
        gram_iterate_(one, polynomials, workspace=work)
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
    polynomials = quintics(coefficients, steps)
    if form == "gram":
        return gram_work(a, b, polynomials, whole=device != "cpu")[0]
    return standard_work(a, b, polynomials)[0]


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
    exact, actual = polar_factor(matrices), exactly(orthogonalized)
    norms = torch.linalg.matrix_norm(exact) * torch.linalg.matrix_norm(actual)
    return (exact * actual).sum(dim=(-2, -1)) / norms
