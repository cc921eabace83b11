"""Muon's arithmetic once more, as plainly as it goes, in float64: what every claim is held against.

Newton–Schulz is a polynomial of singular values, so it is computed from a singular value decomposition.

    M <- mu M + G                    U = G + mu M, or M without Nesterov ("average": (1 - mu) G in place of G)
    O  = V p(S / ||U||) W^T          of U = V S W^T; p: the quintics, one after the other
    W <- (1 - lr lambda) W - lr scale(A, B) O

How far a sound implementation may be from it is not guessed: `tolerance` rounds the same arithmetic as a processor
would, in several orders, and sees how far that moves the result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Quintic = tuple[float, float, float]
MUON: Quintic = (3.4445, -4.7750, 2.0315)  # Jordan's
SCALES: dict[str, tuple[str, Callable[[int, int], float]]] = {  # name -> formula, and the factor of an [A, B]
    "match_rms": ("0.2 sqrt(max(A, B))", lambda a, b: 0.2 * math.sqrt(max(a, b))),
    "original": ("sqrt(max(1, A / B))", lambda a, b: math.sqrt(max(1.0, a / b))),
    "spectral": ("sqrt(A / B)", lambda a, b: math.sqrt(a / b)),
    "unit": ("1", lambda a, b: 1.0),
}
SHAPES = ((16, 24), (24, 16), (16, 16), (8, 6))  # that a comparison with the reference trains
TIMES_CONTROL = 4  # two draws of the same rounding: either may come out larger (as the book's certificates have it)


@dataclass(frozen=True)
class Arithmetic:
    """One Muon's arithmetic, complete. scale: (A, B) -> factor. precision: None for float64."""

    nesterov: bool
    polynomials: tuple[Quintic, ...]
    scale: Callable[[int, int], float]
    precision: torch.dtype | None = None
    average: bool = False  # what is summed is (1 - mu) G, which shows where a schedule moves mu

    def fed(self, buffer: Tensor, gradient: Tensor, mu: float) -> Tensor:
        """Update the momentum `buffer` in place; return what Newton–Schulz is fed."""
        part = (1 - mu) * gradient if self.average else gradient
        buffer.mul_(mu).add_(part)
        return part + mu * buffer if self.nesterov else buffer

    def orthogonalized(
        self,
        matrix: Tensor,  # [A, B]
    ) -> Tensor:  # [A, B], float64
        """Apply the quintics to the singular values of a matrix, its Frobenius norm divided out."""
        if self.precision is not None:
            return self._rounded(matrix.to(self.precision)).double()
        left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        norm = values.norm()
        return left @ torch.diag(self.response(values / norm if norm > 0 else values)) @ right

    def _rounded(
        self,
        matrix: Tensor,  # [A, B], not zero
    ) -> Tensor:  # [A, B]
        """Iterate as a processor does, every product rounded to the dtype of the matrix."""
        if matrix.shape[0] > matrix.shape[1]:
            return self._rounded(matrix.mT).mT
        x = matrix / torch.linalg.vector_norm(matrix, dtype=torch.promote_types(matrix.dtype, torch.float32))
        for a, b, c in self.polynomials:
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    def response(
        self,
        values: Tensor,  # singular values of a matrix of norm 1, [n]
    ) -> Tensor:  # [n], float64
        """Return what the quintics make of singular values."""
        values = values.double()
        for a, b, c in self.polynomials:
            values = a * values + b * values**3 + c * values**5
        return values

    def band(self, lowest: float = 1e-2) -> tuple[float, float]:
        """Return the least and the largest singular value that those in [lowest, 1] become."""
        response = self.response(torch.logspace(math.log10(lowest), 0, 4001, dtype=torch.float64))
        return float(response.min()), float(response.max())


_ARITHMETICS: list[Arithmetic] = []  # by their numbers in groups, so that a copied optimizer finds its own


class PlainMuon(Optimizer):
    """Muon by the arithmetic above, one parameter at a time; groups hold lr, weight_decay and momentum."""

    def __init__(self, params: Any, arithmetic: Arithmetic, lr: float, weight_decay: float, momentum: float) -> None:
        options = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, arithmetic=len(_ARITHMETICS))
        super().__init__(params, options)
        _ARITHMETICS.append(arithmetic)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, lr, arithmetic = self.state[p], float(group["lr"]), _ARITHMETICS[group["arithmetic"]]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                fed = arithmetic.fed(state["momentum_buffer"], p.grad, group["momentum"])
                update = arithmetic.scale(*p.shape) * arithmetic.orthogonalized(fed)
                p.copy_((1 - lr * group["weight_decay"]) * p.double() - lr * update)
        return loss


def quintics(coefficients: Quintic | Sequence[Quintic], steps: int) -> tuple[Quintic, ...]:
    """Return one for each step: the same in all, or a sequence's, whose last one is repeated."""
    rows: Any = [coefficients] if isinstance(coefficients[0], int | float) else [*coefficients]
    return tuple((rows + [rows[-1]] * steps)[:steps])


@functools.cache
def tolerance(polynomials: tuple[Quintic, ...], precision: torch.dtype, steps: int = 4) -> float:
    """Return how far, relative to its own size, an update may be from the exact one by rounding alone.

    It is `TIMES_CONTROL` times the largest distance of the kit's own roundings: products in `precision`, of matrices
    and of their transposes and negatives with rows in another order, which changes the order of sums.
    """
    exact = Arithmetic(True, polynomials, SCALES["unit"][1])
    rounded = Arithmetic(True, polynomials, SCALES["unit"][1], precision)
    distances = []
    for shape in SHAPES:
        for seed in range(steps):
            matrix = gaussian(*shape, seed=seed)
            expected = exact.orthogonalized(matrix)
            order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
            undone = torch.argsort(order)
            distances += [distance(rounded.orthogonalized(matrix), expected)]
            distances += [distance(-rounded.orthogonalized(-matrix[order])[undone], expected)]
            distances += [distance(rounded.orthogonalized(matrix.mT.contiguous()).mT, expected)]
    return TIMES_CONTROL * max(distances)


# ---- Numbers that are the same in every process ------------------------------------------------------------


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a Gaussian tensor, drawn in float64 so that every dtype gets the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected|| over all elements, in float64."""
    expected = expected.detach().double()
    return float((actual.detach().double() - expected).norm() / expected.norm())
