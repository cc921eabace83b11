"""Newton–Schulz without a whole matrix anywhere: what TP ranks add up are Gram matrices. A study, not a strategy.

Let TP cut X = [X_1 ... X_T], each [u, v / T]. A step of Newton–Schulz needs X only through R = X X^T, [u, u], and that
is a sum of what every rank can make by itself:

    R = X_1 X_1^T + ... + X_T X_T^T        one all-reduce of [u, u]
    X_i <- (a I + b R + c R^2) X_i         local

So five steps are five all-reduces. Fewer will do: the next Gram matrix is P R P with P = a I + b R + c R^2, and every
rank has all of that. `segments` says how many steps are made of one all-reduce: (1, 1, 1, 1, 1) is the plain form, (5,)
sends once. Long segments lose digits (see `distmuon.optim.gram`): in bf16 they are unsafe.

Against `owner`, which sends blocks to one rank and blocks of the update back, with g and w bytes per element of what is
added up and of a block, S all-reduces, by the ring formula and over all T ranks together:

    Gram    2 (T - 1) S u^2 g       owner    2 (T - 1) u v w / T       Gram sends less where v / u > S T g / w

and of R only a triangle has to travel, which is half of it. Every rank makes all products of [u, u] by itself: those
are made T times.

Source: all-reduced Gram matrices are the mode "distributed" of Megatron-LM's and Emerging-Optimizers' Muon.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from distmuon.optim.coefficients import quintics
from distmuon.optim.newton_schulz import flops
from distmuon.sharding.collectives import Group
from distmuon.sharding.ledger import Ledger

STEPWISE, AT_ONCE = (1, 1, 1, 1, 1), (5,)
NORM_LABEL, GRAM_LABEL = "norm", "Gram matrix"


# ---- The iteration ----------------------------------------------------------------------------------------


def newton_schulz_over_tp(
    block: Tensor,  # M[I_tp, J] for dim 0, M[I, J_tp] for dim 1
    tp: Group,
    dim: int,
    segments: Sequence[int] = STEPWISE,
    triangle: bool = False,
) -> Tensor:  # O[I_tp, J] or O[I, J_tp]
    """Orthogonalize a matrix that is cut over TP along `dim`, in the dtype of its blocks. Collective.

    segments: steps made of each all-reduce, first to last. triangle: let only R's upper triangle travel.
    A zero matrix gives zero. The norm is taken as it is: scales beyond 1e15 or below 1e-15 want `newton_schulz`.
    """
    x = block.mT if dim == 0 else block  # [u, v / T]
    norm = tp.all_reduce(x.square().sum(), NORM_LABEL).sqrt()
    x = torch.where(norm == 0, 0.0, x / norm)
    schedule = iter(quintics("muon", sum(segments)))
    for steps in segments:
        gram = _added_up(x @ x.mT, tp, triangle)  # R, [u, u]
        x = polynomial(gram, [next(schedule) for _ in range(steps)]) @ x
    return (x.mT if dim == 0 else x).contiguous()


def polynomial(
    gram: Tensor,  # R, [u, u]
    schedule: Sequence[tuple[float, float, float]],
) -> Tensor:  # Q, [u, u]
    """Return what some steps in a row multiply X by, all of it made from the first step's Gram matrix."""
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    product = None
    for number, (a, b, c) in enumerate(schedule, 1):
        # a I + b R + c R^2
        factor = a * identity + b * gram + c * (gram @ gram)
        product = factor if product is None else product @ factor
        if number < len(schedule):
            # R of the next step; all are polynomials of the first, so their order does not matter
            gram = factor @ gram @ factor
    assert product is not None
    return product


def _added_up(
    partial: Tensor,  # X_i X_i^T, [u, u]
    tp: Group,
    triangle: bool,
) -> Tensor:  # R, [u, u]
    if not triangle:
        return tp.all_reduce(partial, GRAM_LABEL)
    rows, columns = torch.triu_indices(*partial.shape, device=partial.device)
    packed = tp.all_reduce(partial[rows, columns], GRAM_LABEL)
    whole = torch.empty_like(partial)
    whole[rows, columns] = packed
    whole[columns, rows] = packed
    return whole


# ---- What it costs ----------------------------------------------------------------------------------------


def predict(uncut: int, tp: int, item_bytes: int, segments: Sequence[int], triangle: bool = False) -> Ledger:
    """Return the ledger of one rank after one matrix. uncut: u, the side that TP does not cut."""
    ledger = Ledger()
    ledger.record("all_reduce", "tp", tp, item_bytes, NORM_LABEL)
    ledger.record("all_reduce", "tp", tp, _travelling(uncut, triangle) * item_bytes, GRAM_LABEL, calls=len(segments))
    return ledger


def gram_bytes(uncut: int, tp: int, item_bytes: int, segments: Sequence[int], triangle: bool = False) -> int:
    """Return what all T ranks together send for one matrix: 2 (T - 1) (S u^2 g + g), chunks of the ring rounded up."""
    chunks = len(segments) * -(-_travelling(uncut, triangle) * item_bytes // tp) + -(-item_bytes // tp)
    return tp * 2 * (tp - 1) * chunks


def owner_bytes(shape: Sequence[int], tp: int, item_bytes: int) -> int:
    """Return what all T ranks together send for one matrix under `owner`: 2 (T - 1) u v w / T."""
    return 2 * (tp - 1) * (shape[0] * shape[1] // tp) * item_bytes


def gram_flops(shape: Sequence[int], dim: int, tp: int, segments: Sequence[int]) -> int:
    """Return the operations of all T ranks together for one matrix of whole `shape`, cut along `dim`.

    Per segment the Gram matrix and its polynomial times X, 4 u^2 v in all, shared out; and on every rank products of
    [u, u]: of n steps, n squares, n - 1 products of polynomials, and 2 (n - 1) for the next Gram matrices.
    """
    u, v = shape[1 - dim], shape[dim]
    squares = sum(n + 3 * (n - 1) for n in segments)
    return len(segments) * 4 * u * u * v + tp * squares * 2 * u**3


def break_even(tp: int, segments: Sequence[int], item_bytes: int, block_bytes: int, triangle: bool = False) -> Fraction:
    """Return the v / u above which Gram sends fewer bytes than owner: S T g / w, or half of it, u being large."""
    return Fraction(len(segments) * tp * item_bytes, block_bytes) / (2 if triangle else 1)


def _travelling(uncut: int, triangle: bool) -> int:
    return uncut * (uncut + 1) // 2 if triangle else uncut * uncut


# ---- The table --------------------------------------------------------------------------------------------

SHAPES = ((1024, 1024), (1024, 4096), (1024, 16384), (4096, 1024))  # [A, B]
FORMS = {  # what is added up -> (segments, bytes per element, triangle); owner's blocks travel in bf16
    "five sums, bf16": (STEPWISE, 2, False),
    "one sum, float32": (AT_ONCE, 4, False),
    "one triangle, float32": (AT_ONCE, 4, True),
}


def table(shapes: Sequence[Sequence[int]] = SHAPES, sizes: Sequence[int] = (2, 4, 8), dim: int = 1) -> list[str]:
    """Return one line per shape, T and form: bytes that all ranks send for one matrix, calls, operations, in integers.

    dim: which of [A, B] TP cuts. Owner's calls are per bucket, whatever is in it; Gram's as well if equal shapes are
    added up together.
    """
    lines = [f"{'shape':>12} {'T':>2}  {'':22}{'bytes':>13} {'calls':>5} {'operations':>16}  fewer bytes"]
    for shape in shapes:
        for tp in sizes:
            owned, name = owner_bytes(shape, tp, 2), f"{shape[0]}x{shape[1]}"
            lines.append(f"{name:>12} {tp:2}  {'owner, bf16':22}{owned:13,} {2:5} {flops(shape):16,}")
            for form, (segments, item_bytes, triangle) in FORMS.items():
                sent = gram_bytes(shape[1 - dim], tp, item_bytes, segments, triangle)
                work = gram_flops(shape, dim, tp, segments)
                said = "Gram" if sent < owned else "owner" if sent > owned else "equal"
                lines.append(f"{'':12} {'':2}  {form:22}{sent:13,} {len(segments) + 1:5} {work:16,}  {said}")
    return lines
