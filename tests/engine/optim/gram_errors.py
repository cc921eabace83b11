"""How far the forms of Newton–Schulz end from float64 in bf16, on singular values of many kinds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from distmuon.optim.coefficients import quintics
from distmuon.optim.gram import gram_iterate_
from distmuon.optim.newton_schulz import _iterate, unit_frobenius_
from tools.spectra import spectra


class FormErrors(NamedTuple):
    """How far both forms end from float64, relative in the Frobenius norm, on one spectrum."""

    spectrum: str
    shape: tuple[int, int]
    coefficients: str
    standard: float
    gram: float

    @property
    def bound(self) -> float:
        """What the Gram form may err by: about as much as the standard form, or as little as nobody minds."""
        return max(1.5 * self.standard, 0.03)

    @property
    def safe(self) -> bool:
        return self.gram <= self.bound


def gram_errors(
    shapes: Sequence[tuple[int, int]],  # [m, n], m <= n
    coefficients: Sequence[str] = ("muon", "polar_express"),
    restarts: Collection[int] | None = None,
    names: Collection[str] | None = None,
    batched: bool = False,
    steps: int = 5,
) -> Iterator[FormErrors]:
    """Try both forms in bf16 on every one of `spectra`, or on those of `names`, with random singular directions.

    restarts: see `gram.gram_iterate_`. batched: run the Gram form the way that a batch goes.
    """
    for m, n in shapes:
        draw = torch.Generator().manual_seed(m + n)
        u, v = (torch.linalg.qr(torch.randn(k, m, generator=draw, dtype=torch.float64)).Q for k in (m, n))
        for name, values in spectra(m).items():
            if names is not None and name not in names:
                continue
            x = unit_frobenius_((u * values) @ v.mT)
            for row in coefficients:
                polynomials, exact = quintics(row, steps), values / values.norm()
                for a, b, c in polynomials:
                    exact = a * exact + b * exact**3 + c * exact**5
                wanted = (u * exact) @ v.mT
                narrow = x.bfloat16()
                standard = _iterate(narrow, polynomials)
                gram = gram_iterate_(narrow[None] if batched else narrow, polynomials, restarts)  # overwrites it
                errors = (float((one - wanted).norm() / exact.norm()) for one in (standard, gram))
                yield FormErrors(name, (m, n), row, *errors)
