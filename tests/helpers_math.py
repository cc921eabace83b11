"""What several unit tests share: repeatable hypothesis settings, seeded matrices, what a clear error is, a count."""

from typing import Any

import pytest
from hypothesis import settings
from torch.utils._python_dispatch import TorchDispatchMode

from muon_conformance.reference import distance, gaussian

__all__ = ["Operations", "distance", "gaussian", "message", "quick"]


def quick(examples: int) -> settings:
    """Return hypothesis settings for `examples` cases, the same ones in every run and with no deadline."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


def message(error: pytest.ExceptionInfo) -> str:
    """Return an error's text, after checking that it is written for people: one line that ends like a sentence."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


class Operations(TorchDispatchMode):
    """Context manager; `count` is how many operators ran inside: on a GPU, about as many kernels are launched."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
