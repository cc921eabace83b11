"""Strategies: ways to let Newton–Schulz see whole matrices. One file each, here or anywhere; `load` finds it.

What such a file holds stands in `strategy`. Nothing here imports torch before a strategy is loaded.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from distmuon.optim.strategies.costs import StrategyCosts
    from distmuon.optim.strategies.strategy import Strategy
    from distmuon.sharding.layout import Layout

PUBLISHED = ("parameters", "updates")  # what the last move may send
MOVES = ("dp_gather", "tp_gather", "newton_schulz", "tp_shard", "dp_shard")
METHODS = ("plan", "options", "bucket_groups", "waves", *MOVES, "lr_ratio")  # what every strategy has


@cache  # every optimizer asks, several times, and a look into the folder takes longer than planning a small model
def names() -> tuple[str, ...]:
    """Return the strategies that are here: the modules of this package."""
    found = {module.name for module in pkgutil.iter_modules(__path__)} - {"strategy", "costs"}
    return tuple(sorted(found))


def is_file(name: str | Path) -> bool:
    """Say whether `name` is meant as the path of a file with a strategy of one's own."""
    return isinstance(name, str | Path) and str(name).endswith(".py")


def complaint(name: str) -> str:
    """Return what is wrong with the strategy `name` as far as can be told without importing it; "" for nothing."""
    if not is_file(name):
        known = ", ".join(names())
        return "" if name in names() else f"choose one of {known}, or the path of a .py file with your own"
    try:
        tree = ast.parse(Path(name).read_text(encoding="utf-8"), name)
    except OSError as error:
        return f"that file cannot be read ({error.strerror}); write it first, or choose one of {', '.join(names())}"
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"Python cannot read that file ({error}); mend it"
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    if not any(isinstance(target, ast.Name) and target.id == "STRATEGY" for target in targets):
        return "that file names no strategy; end it with a line `STRATEGY = TheClass`"
    return ""


def module(name: str) -> ModuleType:
    """Return the module of the strategy `name`, one of `names()` or a path; raises ValueError, saying what is wrong."""
    if wrong := complaint(name):
        raise ValueError(f"strategy is {name!r}; {wrong}.")
    if not is_file(name):
        return importlib.import_module(f"{__name__}.{name}")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def planner(name: str) -> Callable[..., Layout]:
    """Return what lays parameters out for the strategy `name`: (specs, muon, dp, tp, bucket_size) -> map."""
    return load(name).plan


def load(name: str) -> type[Strategy]:
    """Return the strategy `name`; raises ValueError, saying what is wrong, for an unknown or an unfinished one."""
    found = module(name).STRATEGY
    if missing := [name for name in METHODS if not callable(getattr(found, name, None))]:
        raise ValueError(
            f"strategy is {name!r}; its class lacks {', '.join(missing)}: write them, or inherit GatherAll."
        )
    return found


def costs_of(name: str) -> StrategyCosts:
    """Return what the strategy `name` says of its costs; raises ValueError where it says nothing."""
    from distmuon.optim.strategies.costs import StrategyCosts  # and with it torch

    found = getattr(module(name), "COSTS", None)
    if found is None:
        raise ValueError(f"strategy is {name!r}, of which nothing is predicted; give its file COSTS.")
    if not isinstance(found, StrategyCosts):
        raise ValueError(f"strategy is {name!r}, whose COSTS are {found!r}; make them StrategyCosts(sends, allocates).")
    return found


def priced(name: str) -> StrategyCosts:
    """Return `costs_of` a strategy that says of its work, too; raises ValueError for one that does not."""
    found = costs_of(name)
    if any(each.tasks is None for each in (found, *(other for _, other in found.others))):
        raise ValueError(f"strategy is {name!r}, whose work is not known; give its COSTS `tasks`.")
    return found


def has_costs(name: str) -> bool:
    """Say whether the strategy `name` says what it costs."""
    return not complaint(name) and hasattr(module(name), "COSTS")


def having(option: str) -> list[str]:
    """Return the strategies here that have this option of a group for their own."""
    return [name for name in names() if option in load(name).options({})]
