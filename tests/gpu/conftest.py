"""GPU boxes have neither a browser nor notebooks, which tests/conftest.py imports: here pytest stops at this folder.

`run_on_gpus.py` says so by `--confcutdir`. As a part of all tests this file changes nothing.
"""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many commands run side by side: each starts up to eight ranks, and two cores keep one going."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))
