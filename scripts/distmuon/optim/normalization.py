"""What some put before and after Newton–Schulz: rows or columns of equal length, and NorMuon's memory of their lengths.

    before   MuonEq     X <- D_r^(-1/2) X D_c^(-1/2)        D_r, D_c: squared lengths of the rows, of the columns
    after    Muon+      O <- rows, then columns, or one of them, divided by their lengths
             NorMuon    v <- beta2 v + (1 - beta2) mean of O^2 over each row,    O <- O / sqrt(v)

All of them need whole rows and whole matrices, as Newton–Schulz does, so they are done beside it, by whoever has them.
What is done after it leaves a matrix's Frobenius norm as it was, so that `scale` and the learning rate mean the same.

Sources: MuonEq (Chang et al. 2026, arXiv 2603.28254); Muon+ (Zhang et al. 2026, arXiv 2602.21545, which does not keep
the norm); NorMuon (Li et al. 2025, arXiv 2510.05491, whose code keeps it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from distmuon.optim.newton_schulz import unit_frobenius_

InputNorm = Literal["rows", "columns", "both"]
OutputNorm = Literal["rows", "columns", "rows_columns", "columns_rows", "normuon"]
INPUT_NORMS, OUTPUT_NORMS = get_args(InputNorm), get_args(OutputNorm)
ROWS, COLUMNS, ALL = -1, -2, (-2, -1)  # what a length is taken over
OVER = {"rows": [ROWS], "columns": [COLUMNS], "rows_columns": [ROWS, COLUMNS], "columns_rows": [COLUMNS, ROWS]}
EPS = 1e-8  # NorMuon's, beside a root mean square that is about 1 / sqrt(longer side)


def equalize_input_(
    matrices: Tensor,  # [..., A, B]; overwritten
    how: str,
) -> Tensor:  # the same tensor
    """Give all rows, columns or both the same length; with both, each is divided by its length from before.

    A row of zeros stays. Whatever the scale of the input, the result is that of a matrix of norm 1.
    """
    x = unit_frobenius_(_widened(matrices))
    rows, columns = (_length(x, over) for over in (ROWS, COLUMNS))
    if how != "columns":
        x.div_(rows)
    if how != "rows":
        x.div_(columns)
    return matrices.copy_(x)


def normalize_output_(
    matrices: Tensor,  # O, [..., A, B]; overwritten
    how: str,
) -> Tensor:  # the same tensor
    """Divide rows and columns by their lengths, in the order that `how` says, and keep the Frobenius norm."""
    x = _widened(matrices)
    before = _length(x, ALL)
    for over in OVER[how]:
        x.div_(_length(x, over))
    return matrices.copy_(x.mul_(before / _length(x, ALL)))


def normuon_(
    matrices: Tensor,  # O, [..., A, B]; overwritten
    moments: Tensor,  # v, [..., A, 1], float32 or wider; overwritten
    beta2: float,
) -> Tensor:  # the matrices
    """Fold the mean square of every row into its moment, divide the row by the root, and keep the Frobenius norm."""
    x = _widened(matrices)
    before = _length(x, ALL)
    moments.lerp_(x.square().mean(dim=ROWS, keepdim=True), 1 - beta2)
    x.div_(moments.sqrt().add_(EPS))
    return matrices.copy_(x.mul_(before / _length(x, ALL)))


def _widened(matrices: Tensor) -> Tensor:
    """Return a copy in float32, or in float64 if it is that."""
    return matrices.to(torch.promote_types(matrices.dtype, torch.float32), copy=True)


def _length(x: Tensor, over: int | Sequence[int]) -> Tensor:  # as x, with 1 in place of what it is taken over
    """Return lengths, and 1 for what is zero: it stays zero when it is divided."""
    length = torch.linalg.vector_norm(x, dim=over, keepdim=True)
    return length.masked_fill_(length == 0, 1.0)
