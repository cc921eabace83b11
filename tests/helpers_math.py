"""What several unit tests share: repeatable hypothesis settings, seeded matrices, and what a clear error is."""

import pytest
import torch
from hypothesis import settings
from torch import Tensor


def quick(examples: int) -> settings:
    """Return hypothesis settings for `examples` cases, the same ones in every run and with no deadline."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a Gaussian tensor, drawn in float64 so that every dtype gets the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def distance(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected|| over all elements, in float64."""
    expected = expected.detach().double()
    return float((found.detach().double() - expected).norm() / expected.norm())


def message(error: pytest.ExceptionInfo) -> str:
    """Return an error's text, after checking that it is written for people: one line that ends like a sentence."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text
