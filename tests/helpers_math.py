"""What several unit tests share: repeatable hypothesis settings, seeded matrices, and what a clear error is."""

import pytest
from hypothesis import settings

from distmuon.conformance.reference import distance, gaussian

__all__ = ["distance", "gaussian", "message", "quick"]


def quick(examples: int) -> settings:
    """Return hypothesis settings for `examples` cases, the same ones in every run and with no deadline."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


def message(error: pytest.ExceptionInfo) -> str:
    """Return an error's text, after checking that it is written for people: one line that ends like a sentence."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text
