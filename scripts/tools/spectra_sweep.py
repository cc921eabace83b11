"""How safe the Gram form of Newton–Schulz is: all forms in bf16, on singular values of many kinds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distmuon.optim.coefficients import quintics
from distmuon.optim.gram import gram_iterate_
from distmuon.optim.newton_schulz import _iterate, unit_frobenius_


def spectra(
    m: int,
) -> dict[str, Tensor]:  # name -> [m], float64, the largest first, up to a factor
    """Return singular values of many kinds, kind and unkind, by name."""
    i = torch.arange(m, dtype=torch.float64)
    t, ones = (i + 0.5) / m, torch.ones(m, dtype=torch.float64)  # t: the quantile of each, in (0, 1)
    found = {
        "all equal": ones,
        "one of them 0": torch.where(i < m - 1, ones, 0.0),
        "within 1 %": 1 - 0.01 * t,
        "within 10 %": 1 - 0.1 * t,
        "linear to 1/2": 1 - t / 2,
        "linear to 0": 1 - t,
        "quadratic to 0": (1 - t) ** 2,
        "half circle": torch.cos(t * math.pi / 2),
        "square Gaussian": 2 * torch.cos((math.pi / 2) * t**0.5),  # roughly a quarter circle
        "few outliers, 30": torch.where(i < max(1, m // 64), 30 * ones, 1.0),
        "lognormal": torch.exp(torch.special.ndtri(1 - t)),
        "lognormal, wide": torch.exp(3 * torch.special.ndtri(1 - t)),
        "heavy tail": t ** (-1 / 1.5),
        "heavier tail": 1 / t**1.5,
        "clusters 1 and 1/10": torch.where(t < 0.5, ones, 0.1),
        "clusters 1 and 1/1000": torch.where(t < 0.5, ones, 1e-3),
        "clusters 1, 0.3, 0.03": torch.where(t < 1 / 3, ones, torch.where(t < 2 / 3, 0.3, 0.03)),
        "a tenth in a far cluster": torch.where(t < 0.1, ones, 0.01),
    }
    found |= {f"an outlier, {size}": torch.where(i < 1, size * ones, 1.0) for size in (10, 100, 1000)}
    found |= {f"log to 1e-{digits}": 10 ** (-digits * t) for digits in (1, 2, 3, 4, 6)}
    found |= {f"power -{power}": (1 + i) ** -power for power in (0.5, 1.0, 2.0)}
    found |= {f"rank {rank}": torch.where(i < rank, ones, 0.0) for rank in (1, 4, m // 8, m // 2)}
    found |= {"exponential": torch.exp(-20 * t)}
    return found


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
                schedule, exact = quintics(row, steps), values / values.norm()
                for a, b, c in schedule:
                    exact = a * exact + b * exact**3 + c * exact**5
                wanted = (u * exact) @ v.mT
                narrow = x.bfloat16()
                standard = _iterate(narrow, schedule)
                gram = gram_iterate_(narrow[None] if batched else narrow, schedule, restarts)  # overwrites it
                errors = (float((one - wanted).norm() / exact.norm()) for one in (standard, gram))
                yield FormErrors(name, (m, n), row, *errors)
