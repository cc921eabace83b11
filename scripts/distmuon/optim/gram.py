"""Newton–Schulz in the Gram form: several steps at once on the small square X X^T, symmetric products by halves.

In bfloat16 and wider types the form is centred, as follows. In float16 it is not: see `half_gram_iterate`.

Write X = x Y with a number x, and Y Y^T = nu (I + R) with the mean eigenvalue nu, so that R says only how far the
directions of X are from being equally loud. With r = nu x^2, a quintic (a, b, c) is a polynomial in R,

    a I + b X X^T + c (X X^T)^2 = z I + e Z,    z = a + b r + c r^2,    e = b r + 2 c r^2,    Z = R + (c r^2 / e) R R

With w = e / z, it takes X to z (I + w Z) X, and does so to R and r too, without a look at X:

    T = R + w Z (I + R),    R <- T + w Z (I + T),    r <- z^2 r

Quintic after quintic multiplies up to q (I + s Q), and one wide product, Y <- Y + s Q Y, takes all of them at once.

Why centred: bf16 keeps 8 bits. A polynomial that holds its I is rounded as coarsely as 1 is, which is fatal where X is
nearly orthogonal and all that is left to do is smaller than that. Here what is rounded is as small as what is left.
Why anew: a Gram matrix that is carried along drifts from the true one. Two steps it bears; after the second, and after
every later one, it is computed from X again. How safe that is: test_newton_schulz tries it on dozens of spectra.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

Quintic = tuple[float, float, float]
Number = Any  # a float, or [k, 1, 1] in float32, one for each matrix: to read those would make a GPU wait

# On a CPU a symmetric product is made in strips of rows up to the diagonal, and the rest mirrored; thin ones are slow.
STRIPS_FROM, STRIP_ROWS, MOST_STRIPS = 384, 128, 8
SMALLEST = 1e-7  # how near to 0, relative to their terms, z and e may come: w divides by one, Z by the other

# In float16: X is held times this, because an entry of X is as small as 1e-5 in a large matrix, and below 6e-5 float16
# loses digits; no entry is larger than about 1. So many steps are taken on one Gram matrix, and fewer where one of them
# is steeper than GENTLE: what 34 spectra bear, at many shapes.
HALF_SCALE, HALF_STEPS, STEEP_STEPS, GENTLE = 2.0**14, 3, 2, 3.5
KERNEL_FROM = 2**35  # operations from which the kernel's half is faster than all of it through cuBLAS, on one H200
KERNEL_SHARE = 0.6  # of cuBLAS's time, at least: what half of the operations take


class GramWorkspace:
    """The memory that one call after the other writes to: one m x n, and m x m as many as are needed at a time."""

    def __init__(
        self,
        like: Tensor,  # [..., m, n]
    ) -> None:
        self.spare = torch.empty_like(like)
        self.squares: list[Tensor] = []

    def take(self) -> Tensor:  # [..., m, m]
        """Return an m x m that nobody uses, with anything in it."""
        rows = self.spare.shape[-2]
        return self.squares.pop() if self.squares else self.spare.new_empty(*self.spare.shape[:-1], rows)

    def give_back(self, *squares: Tensor) -> None:
        self.squares.extend(squares)


def gram_iterate_(
    x: Tensor,  # [m, n] or [k, m, n], m <= n; overwritten
    polynomials: Sequence[Quintic],
    restarts: Collection[int] | None = None,
    workspace: GramWorkspace | None = None,
) -> Tensor:  # the same tensor
    """Apply the quintics, at least one, to one matrix or to a batch, in the dtype of `x`: bfloat16, float32 or float64.

    restarts: the steps after which the Gram matrix is computed anew; None: the second and every later one, which in
        bf16 is as safe as the standard form. Fewer are not.
    workspace: from an earlier call on the same shape and dtype, to use its memory again.
    """
    work = workspace or GramWorkspace(x)
    y, spare, factor = x, work.spare, 1.0  # X = factor Y
    with torch.autocast(x.device.type, enabled=False):  # it would choose the dtype for us
        *earlier, last = segments(polynomials, restarts)
        for segment in earlier:
            polynomial, s, q = _polynomial(y, factor, segment, work)
            # Y <- Y + s Q Y    [m, n]
            spare.copy_(y)
            _add_product(spare, polynomial, y, s)
            work.give_back(polynomial)
            y, spare, factor = spare, y, factor * q
        # X = factor q (Y + s Q Y)    [m, n]
        polynomial, s, q = _polynomial(y, factor, last, work)
        torch.mul(y, factor * q, out=spare)
        _add_product(spare, polynomial, y, factor * q * s)
        work.give_back(polynomial)
    return spare if spare is x else x.copy_(spare)


def segments(polynomials: Sequence[Quintic], restarts: Collection[int] | None = None) -> Iterator[list]:
    """Yield the quintics from one Gram matrix to the next."""
    ends = range(2, len(polynomials)) if restarts is None else sorted(restarts)
    bounds = [0, *(end for end in ends if 0 < end < len(polynomials)), len(polynomials)]
    for begin, end in pairwise(bounds if polynomials else []):
        yield list(polynomials[begin:end])


def _polynomial(
    y: Tensor,  # [..., m, n]
    factor: Number,  # x
    quintics: Sequence[Quintic],
    work: GramWorkspace,
) -> tuple[Tensor, Number, Number]:  # Q, [..., m, m]; s; q
    """Return q (I + s Q): what the quintics, one after the other, multiply X = x Y by."""
    nu = _mean_eigenvalue(y)
    # R = Y Y^T / nu - I    [m, m]; rounded once, when all of it is summed
    gram = work.take().zero_()
    gram.diagonal(dim1=-2, dim2=-1).fill_(-1)
    _add_symmetric(gram, y, y.mT, 1 / nu)
    r, product, s, q = nu * factor * factor, None, 1.0, 1.0
    for left, (a, b, c) in zip(reversed(range(len(quintics))), quintics, strict=True):
        z = _away_from_zero(a + b * r + c * r * r, abs(a) + abs(b) * r + abs(c) * r * r)
        e = _away_from_zero(b * r + 2 * c * r * r, abs(b) * r + 2 * abs(c) * r * r)
        w = e / z
        # Z = R + (c r^2 / e) R R    [m, m]
        step = work.take().copy_(gram)
        if c:
            _add_symmetric(step, gram, gram, c * r * r / e)
        if left:
            # T = R + w Z (I + R),  R <- T + w Z (I + T),  r <- z^2 r    [m, m]
            half = work.take().copy_(gram)
            _add_to_diagonal(gram, 1.0)
            _add_symmetric(half, step, gram, w)
            gram.copy_(half)
            _add_to_diagonal(half, 1.0)
            _add_symmetric(gram, step, half, w)
            work.give_back(half)
            r = z * z * r
        else:
            work.give_back(gram)
        if product is None:
            product, s, q = step, w, z
        else:
            # Q <- Q + w Z (I / s + Q),  q <- z q    [m, m]
            grown = work.take().copy_(product)
            _add_to_diagonal(product, 1 / s)
            _add_symmetric(grown, step, product, w)
            work.give_back(product, step)
            product, q = grown, q * z
    assert product is not None
    return product, s, q


# ---- In float16 -------------------------------------------------------------------------------------------


def half_gram_iterate(
    x: Tensor,  # [m, n] or [k, m, n], m <= n, float16; HALF_SCALE X
    polynomials: Sequence[Quintic],
    restarts: Collection[int] | None = None,
) -> Tensor:  # as x, but X
    """Apply the quintics, at least one, in the Gram form of Zhang, Amsel, Chen and Dao (2026), for GPUs.

    With R = X X^T, a quintic takes X to (a I + Z) X, where Z = b R + c R R, and R to (a I + Z) R (a I + Z). Quintic
    after quintic multiplies up to Q, and one wide product, Q X, takes several of them at once. Then R is computed anew.

    restarts: the steps after which that happens; None: see `half_restarts`.

    It is not centred, so that its numbers stay small enough for float16, and float16 has the 11 bits that it needs:
    with bfloat16's 8 it errs too much on some spectra. All matrices but X are symmetric and have to stay so: of a
    product's two halves, each rounded for itself, the difference would grow from step to step.
    """
    x = x.contiguous()
    restarts = half_restarts(polynomials) if restarts is None else restarts
    with torch.autocast(x.device.type, enabled=False):  # it would choose the dtype for us
        *earlier, last = segments(polynomials, restarts)
        for segment in earlier:
            x = _half_polynomial(x, segment) @ x
        return _product(_half_polynomial(x, last), x, None, 1 / HALF_SCALE, 0.0)


def half_restarts(polynomials: Sequence[Quintic]) -> list[int]:
    """Return the steps after which the Gram matrix is computed anew in float16.

    The published form does so once, after the second of five steps. That is safe for the coefficients of Jordan and
    others, as is after the third; with Polar Express, five steps end twice as far from float64 as the standard form in
    bf16 where singular values are small.
    """
    restarts, begin = [], 0
    for end in range(1, len(polynomials)):
        gentle = all(slope <= GENTLE for slope, _, _ in polynomials[begin : end + 1])
        if end - begin >= (HALF_STEPS if gentle else STEEP_STEPS):
            restarts.append(end)
            begin = end
    return restarts


def _half_polynomial(
    x: Tensor,  # [..., m, n], HALF_SCALE X
    quintics: Sequence[Quintic],
) -> Tensor:  # [..., m, m]
    """Return Q, by which the quintics, one after the other, multiply X."""
    gram, product = _symmetric_product(x, x.mT, None, HALF_SCALE**-2, 0.0), None
    for left, (a, b, c) in zip(reversed(range(len(quintics))), quintics, strict=True):
        # Z = b R + c R R; its a I is left out, so that Z is rounded as finely as it is small    [m, m]
        step = _symmetric_product(gram, gram, gram, c, b) if c else gram * b
        # Q <- Q (a I + Z)    [m, m]
        if product is None:
            product = step.clone()
            _add_to_diagonal(product, a)
        else:
            product = _symmetric_product(product, step, product, 1.0, a)
        if left:
            # R <- (a I + Z) R (a I + Z)    [m, m]
            gram = _symmetric_product(gram, step, gram, 1.0, a)
            gram = _symmetric_product(step, gram, gram, 1.0, a)
    assert product is not None
    return product


def _symmetric_product(
    left: Tensor,  # [..., m, k]
    right: Tensor,  # [..., k, m]; symmetric, or left^T
    also: Tensor | None,  # [..., m, m], symmetric
    scale: float,
    keep: float,
) -> Tensor:  # [..., m, m]
    """Return scale left right + keep also, symmetric: in our kernel where that is faster, else all of it in cuBLAS."""
    if kernel_pays(left):
        from distmuon.optim.symmetric_kernel import symmetric_product

        return symmetric_product(left, right, also, scale, keep)
    return _product(left, right, also, scale, keep)


def _product(left: Tensor, right: Tensor, also: Tensor | None, scale: float, keep: float) -> Tensor:
    """Return scale left right + keep also."""
    multiply_add = torch.addmm if left.ndim == 2 else torch.baddbmm
    if also is None:
        also, keep = left.new_empty([1] * left.ndim), 0.0  # times 0, it is not looked at, whatever is in it
    return multiply_add(also, left, right, beta=keep, alpha=scale)


def kernel_pays(left: Tensor) -> bool:
    """Return whether our kernel can multiply left by its transpose, and sooner than cuBLAS makes both halves."""
    if not left.is_cuda or isinstance(left, FakeTensor) or torch.compiler.is_compiling():
        return False
    rows, inner = left.shape[-2:]
    matrices = left.numel() // max(1, rows * inner)
    whole = rows % 8 == 0 and inner % 8 == 0  # it loads 16 bytes at a time
    return whole and matrices * rows * rows * inner >= KERNEL_FROM and has_kernel(left.device)


def is_hopper(device: torch.device) -> bool:
    """Return whether this is a GPU like those on which our kernel and the form in float16 were measured."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Return whether our kernel runs on this GPU; where it should and cannot be built, a warning says why not."""
    if not is_hopper(device):
        return False
    try:
        from distmuon.optim.symmetric_kernel import symmetric_product

        one = torch.eye(128, device=device, dtype=torch.float16)
        return bool(symmetric_product(one, one, one, 2.0, -1.0).equal(one))
    except Exception as error:  # Triton is missing, or the C compiler with which it starts its kernels
        warnings.warn(
            f"Newton–Schulz runs without its own kernel on {device}, up to 1.5 times as long, because Triton cannot "
            f"build it here: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False


def half_gram_work(rows: int, columns: int, polynomials: Sequence[Quintic]) -> float:
    """Return the operations of `half_gram_iterate` for one [rows, columns], rows <= columns, as cuBLAS's time."""

    def symmetric(inner: int) -> float:
        return 2 * rows * rows * inner * (KERNEL_SHARE if rows * rows * inner >= KERNEL_FROM else 1)

    grams = 1 + len(half_restarts(polynomials))
    squares = sum(c != 0 for _, _, c in polynomials) + 3 * (len(polynomials) - grams)  # Z; Q and twice R between two
    return grams * (symmetric(columns) + 2 * rows * rows * columns) + squares * symmetric(rows)


# ---- Numbers and products ---------------------------------------------------------------------------------


def _mean_eigenvalue(
    y: Tensor,  # [..., m, n]
) -> Number:  # nu
    """Return ||Y||_F^2 / m, the mean eigenvalue of Y Y^T, or 1 for a zero matrix; of one matrix on a CPU, a float."""
    lines = -1 if y.stride(-1) == 1 else -2  # the other way is slow
    norms = torch.linalg.vector_norm(y, dim=lines, keepdim=True)  # in its own dtype, which is faster and near enough
    norms = norms.to(torch.promote_types(y.dtype, torch.float32))
    square = norms.square().sum(dim=(-2, -1), keepdim=True) / y.shape[-2]
    if y.ndim == 2:
        return square.item() or 1.0
    return torch.where(square == 0, 1.0, square)


def _away_from_zero(value: Number, terms: Number) -> Number:
    """Return `value` with at least `SMALLEST` of the size of its terms: a quintic may have a root just there."""
    if isinstance(value, Tensor):
        limits = torch.finfo(value.dtype)
        least = SMALLEST * terms + limits.tiny / limits.eps  # over z it still has a finite inverse
        return torch.copysign(torch.maximum(value.abs(), least), value)
    return math.copysign(max(abs(value), SMALLEST * terms + sys.float_info.min / sys.float_info.epsilon), value)


def _add_to_diagonal(square: Tensor, number: Number) -> None:
    """square <- square + number I."""
    square.diagonal(dim1=-2, dim2=-1).add_(number.squeeze(-1) if isinstance(number, Tensor) else number)


def _add_product(
    out: Tensor,  # [..., m, n]
    left: Tensor,  # [..., m, k]
    right: Tensor,  # [..., k, n]
    scale: Number,
) -> None:
    """out <- out + scale left right, where data is only ever in the scale: a new beta makes oneDNN compile a kernel."""
    if isinstance(scale, Tensor):
        torch.baddbmm(out, torch.mul(left, scale, out=torch.empty_like(left)), right, out=out)
    else:
        torch.addmm(out, left, right, alpha=scale, out=out)


def _add_symmetric(
    out: Tensor,  # [..., m, m], symmetric
    left: Tensor,  # [..., m, k]
    right: Tensor,  # [..., k, m]
    scale: Number,
) -> None:
    """out <- out + scale left right, a symmetric product; of a single matrix on a CPU, hardly more than half."""
    bounds = [0, len(out)] if isinstance(scale, Tensor) else strip_bounds(len(out), left.shape[-1])
    if len(bounds) == 2:
        _add_product(out, left, right, scale)
        return
    for begin, end in pairwise(bounds):
        _add_product(out[begin:end, :end], left[begin:end], right[:, :end], scale)
        out[:begin, begin:end].copy_(out[begin:end, :begin].mT)


def strip_bounds(rows: int, inner: int) -> list[int]:
    """Return where the strips of a symmetric [rows, rows] begin and end that sums up `inner` products an entry."""
    thinnest = 2 * STRIP_ROWS if inner <= rows else STRIP_ROWS
    strips = min(rows // thinnest, MOST_STRIPS) if rows >= STRIPS_FROM else 1
    return [rows * i // strips for i in range(strips + 1)]


def gram_work(rows: int, columns: int, polynomials: Sequence[Quintic], whole: bool = False) -> tuple[int, int]:
    """Return the floating-point operations for one [rows, columns], rows <= columns, and how many calls make them.

    whole: symmetric products without strips, as on a GPU and in a batch.
    """

    def symmetric(inner: int) -> tuple[int, int]:
        bounds = [0, rows] if whole else strip_bounds(rows, inner)
        flops = sum(2 * (end - begin) * inner * end for begin, end in pairwise(bounds))
        return flops, 2 * len(bounds) - 3  # the strips, and a mirror for each but the first

    grams, quintics = len([*segments(polynomials)]), sum(c != 0 for _, _, c in polynomials)
    squares = quintics + 3 * (len(polynomials) - grams)  # Z's R R; T, R and Q between two that share a Gram matrix
    (gram, gram_calls), (square, square_calls) = symmetric(columns), symmetric(rows)
    flops = grams * (gram + 2 * rows * rows * columns) + squares * square
    # each begins with what it adds to; a Gram matrix with a norm and a diagonal, too
    return flops, grams * (gram_calls + 5) + squares * (square_calls + 1)
