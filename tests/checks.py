"""Checks that every rank of one world makes for itself. A world is started once, and each check is a test of its own.

A module of checks, for ranks to import, has functions (world) that are marked as checks and assert what they find.
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from once import once

from distmuon import launch
from distmuon.launch import World

Check = Callable[..., None]  # takes the world
CHECKS: dict[str, dict[str, Check]] = {}  # of each module, by their names


def check(function: Check) -> Check:
    """Mark a function as a check."""
    CHECKS.setdefault(function.__module__, {})[function.__name__] = function
    return function


def check_each(choices: Iterable[str]) -> Callable[[Callable[[World, str], None]], None]:
    """Mark a function (world, choice) as a check of each of these choices."""

    def mark(function: Callable[[World, str], None]) -> None:
        for choice in choices:
            one = functools.partial(function, choice=choice)  # type: ignore[call-arg]
            CHECKS.setdefault(function.__module__, {})[f"{function.__name__}: {choice}"] = one

    return mark


def examine(world: World, module: str, *given: Any) -> dict[str, str]:
    """Make all checks of a module on this rank; return what went wrong."""
    importlib.import_module(module)
    found = {}
    for name, one in CHECKS[module].items():
        try:
            one(world, *given)
        except (Exception, pytest.fail.Exception):  # the latter is that of pytest.raises
            found[name] = traceback.format_exc()
    return found


def on_every_rank(module: str, *given: Any, dp: int, tp: int = 1) -> Callable[[str], None]:
    """Return the test of a module's checks, which take what is given besides, in a world of dp x tp ranks."""
    importlib.import_module(module)

    @once
    def found() -> list[dict[str, str]]:
        return launch.run(examine, (module, *given), dp=dp, tp=tp)

    @pytest.mark.parametrize("name", CHECKS[module])
    def test(name: str) -> None:
        wrong = [f"rank {rank}: {told[name]}" for rank, told in enumerate(found()) if name in told]
        assert not wrong, "\n".join(wrong)

    return test
