"""Singular values of many kinds, on which forms and coefficients of Newton–Schulz are tried."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
