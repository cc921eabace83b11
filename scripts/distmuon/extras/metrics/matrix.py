"""What to watch while an optimizer trains a matrix: its update, that update's size, how far the matrix stretches.

For an update O [A, B] and the momentum M [A, B] that Newton–Schulz was fed, with singular values s of O and r the
shorter side:

    orthogonality error       ||O O^T - 1||_F / sqrt(r)  =  sqrt(mean((s^2 - 1)^2)), transposed where A > B
    cosine to the polar factor   <O, P> / (||O||_F ||P||_F),  P = (M M^T)^(-1/2) M

P is what Newton–Schulz approaches: Muon (Jordan et al. 2024).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distmuon.sharding.precision import exactly

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


def update_of(before: Tensor, after: Tensor, lr: float, weight_decay: float) -> Tensor:
    """Return the update of one step of a matrix [A, B]: decay and learning rate are taken out again."""
    return ((1 - lr * weight_decay) * before - after) / lr


def rms(update: Tensor) -> float:
    """Return the root of the mean of all squares."""
    return update.square().mean().sqrt().item()


def spectral_norm(weight: Tensor) -> float:
    """Return the largest factor by which `weight` [A, B] stretches any input."""
    return torch.linalg.matrix_norm(weight, ord=2).item()


def orthogonality(
    update: Tensor,  # O, [A, B]
    fed: Tensor,  # M, [A, B]
) -> dict[str, Any]:
    """Compare an update with what Newton–Schulz was to make of `fed`: {"error", "cosine", "singular_values"}.

    The last are the update's, at QUANTILES. All are NaN where one of the two is not finite.

    In float64, by the eigenvalues of two Gram matrices: two eigendecompositions of the shorter side. Directions in
    which M has less than 1e-7 of its norm have no polar factor that can be told from noise, and are left out of P.
    (In float32, where there is nothing wider, less than 1e-3.)
    """
    o, m = (x if x.shape[0] <= x.shape[1] else x.T for x in (exactly(update), exactly(fed)))
    if not (o.isfinite().all() and m.isfinite().all()):
        return {"error": torch.nan, "cosine": torch.nan, "singular_values": [torch.nan] * len(QUANTILES)}
    squares = torch.linalg.eigvalsh(o @ o.T).clamp(min=0)  # s^2
    lengths, directions = torch.linalg.eigh(m @ m.T)
    noise = 1e-14 if o.dtype == torch.float64 else 1e-6
    kept = lengths > noise * lengths[-1]
    directions = directions[:, kept]
    # <O, P> = sum_k q_k^T (O M^T) q_k / |M^T q_k|
    common = (((o @ m.T) @ directions * directions).sum(0) / lengths[kept].sqrt()).sum()
    cosine = common / (squares.sum() * kept.sum()).sqrt()
    levels = torch.tensor(QUANTILES, dtype=o.dtype, device=o.device)
    error = (squares - 1).square().mean().sqrt()
    singular_values = squares.sqrt().quantile(levels)
    return {"error": error.item(), "cosine": cosine.item(), "singular_values": singular_values.tolist()}
