"""How precisely a device computes: in float64, or in float32 where it has nothing wider (Apple's MPS)."""

from __future__ import annotations

import torch
from torch import Tensor


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype for sums and factors on a device: float64, or float32 where there is none."""
    try:
        return torch.empty(1, dtype=torch.float64, device=device).dtype
    except TypeError:  # what MPS raises
        return torch.float32


def default_gather_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return in which dtype momentum travels where nothing else is asked for: bf16, as in the paper, or float64 for
    what is float64.
    """
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def is_narrow(weight: Tensor) -> bool:
    """Return whether a weight has fewer digits than float32."""
    return weight.is_floating_point() and weight.itemsize < 4


def exactly(values: Tensor) -> Tensor:
    """Return the values in float64, in the host's memory where their device has none."""
    on = values if widest(values.device) == torch.float64 else values.cpu()
    return on.to(widest(on.device))
