"""Strategies: ways to let Newton–Schulz see whole matrices. One file each; `load` finds it by name.

What such a file holds stands in `strategy`. Nothing here imports torch before a strategy is loaded.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distmuon.optim.strategies.strategy import Strategy


def names() -> list[str]:
    """Return the strategies there are: the modules of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "strategy")


def load(name: str) -> type[Strategy]:
    """Return the strategy `name`; raises ValueError, naming those there are, for an unknown one."""
    if name not in names():
        raise ValueError(f"strategy is {name!r}; choose one of {', '.join(names())}.")
    return importlib.import_module(f"{__name__}.{name}").STRATEGY
