"""What some put before and after Newton–Schulz: rows or columns of equal length.

    before   MuonEq     U <- D_r^(-1/2) U D_c^(-1/2)     D_r, D_c: squared lengths of the rows, of the columns; or one
    after    Muon+      O <- rows, columns or one after the other divided by their lengths
             NorMuon    V <- beta2 V + (1 - beta2) mean_j O_ij^2,   O_ij <- O_ij / sqrt(V_i)

All need whole rows and columns, as Newton–Schulz needs whole matrices. So whoever runs it does them, too, and no matrix
is sent for them. What is done after it leaves the Frobenius norm as it was, so that `scale` and the learning rate mean
what they mean without; and as NorMuon divides by it, V needs no correction for having begun at zero.

Sources: MuonEq (Chang et al. 2026, arXiv 2603.28254); Muon+ (Zhang et al. 2026, arXiv 2602.21545), which does not keep
the norm; NorMuon (Li et al. 2025, arXiv 2510.05491), whose code keeps it, and whose paper sets the RMS to 0.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from distmuon.optim.newton_schulz import unit_frobenius_

InputNorm = Literal["rows", "columns", "both"]
OutputNorm = Literal["rows", "columns", "rows_columns", "columns_rows"]
INPUT_NORMS, OUTPUT_NORMS = get_args(InputNorm), get_args(OutputNorm)
ROWS, COLUMNS, ALL = -1, -2, (-2, -1)  # what a length is taken over
NORMUON_EPS = 1e-8  # beside the square root of V


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
    """Divide rows or columns, or first the ones and then the others, by their lengths; keep the Frobenius norm."""
    x = _widened(matrices)
    before = _length(x, ALL)
    for which in how.split("_"):
        x.div_(_length(x, ROWS if which == "rows" else COLUMNS))
    return matrices.copy_(x.mul_(before / _length(x, ALL)))


def adapt_rows_(
    matrices: Tensor,  # O, [..., A, B]; overwritten
    moments: Tensor,  # V, [..., A], float32 or wider; updated
    beta2: float,
) -> Tensor:  # the same tensor as the matrices
    """Divide every row by the root of a running mean of its squares, NorMuon's; keep the Frobenius norm."""
    x = _widened(matrices)
    before = _length(x, ALL)
    # V <- beta2 V + (1 - beta2) mean_j O^2
    moments.lerp_(x.square().mean(ROWS), 1 - beta2)
    # O <- O / (sqrt(V) + eps)
    x.div_(moments.sqrt().add_(NORMUON_EPS).unsqueeze(ROWS))
    return matrices.copy_(x.mul_(before / _length(x, ALL)))


def _widened(matrices: Tensor) -> Tensor:
    """Return a copy in float32, or in float64 if it is that."""
    return matrices.to(torch.promote_types(matrices.dtype, torch.float32), copy=True)


def _length(x: Tensor, over: int | Sequence[int]) -> Tensor:  # as x, with 1 in place of what it is taken over
    """Return lengths, and 1 for what is zero: it stays zero when it is divided."""
    length = torch.linalg.vector_norm(x, dim=over, keepdim=True)
    return length.masked_fill_(length == 0, 1.0)
