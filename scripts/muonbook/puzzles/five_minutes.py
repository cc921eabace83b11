"""Five-minute puzzles: the reader completes a small function in a cell, and the next line says whether it is right.

A chapter keeps its own in `small_puzzles.py`: a solution, a few cases, and what to say to a wrong answer.

    def shard_length(numel: int, dp: int) -> int:
        \"\"\"Return the length of a shard: the padded bucket's, divided by D.\"\"\"
        return -(-numel // dp)

    SHARD_LENGTH = FiveMinutes(
        shard_length,
        cases=((8, 4), (9, 4), (1, 8)),
        nudge="A bucket is padded until D divides it.",
        goal="Find the length of a shard from the length of its bucket.",
    )

In the notebook, a cell with a stub, and a cell tagged `remove-input` with the folded solution:

    def shard_length(numel, dp):
        return numel // dp  # nearly

    five_minutes.check(small_puzzles.SHARD_LENGTH, shard_length)

    notebook.source(small_puzzles.shard_length, fold="A solution")

The first wrong case is named, with what the reader's function gave. What is wanted is not told.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from muonbook.puzzles import in_lines


@dataclass(frozen=True)
class FiveMinutes:
    """A small puzzle. solution: the function. cases: tuples of arguments. nudge: one sentence for who is stuck.

    goal: what the function does, in one sentence that begins with a verb: the page of all puzzles says it.
    tolerance: of numbers that are no integers, relative and absolute.
    """

    solution: Callable[..., Any]
    cases: Sequence[tuple[Any, ...]]
    nudge: str
    goal: str
    tolerance: float = 1e-6


def check(puzzle: FiveMinutes, answer: Callable[..., Any]) -> None:
    """Try `answer` on every case, each time on arguments of its own, and print one line: right, or what is not."""
    print(in_lines(verdict(puzzle, answer)))


def verdict(puzzle: FiveMinutes, answer: Callable[..., Any]) -> str:
    """Return the line that `check` prints."""
    for case in puzzle.cases:
        given = ", ".join(map(_shown, case))
        try:
            found = answer(*copy.deepcopy(case))
        except Exception as error:  # whatever it is, it is the reader's, and a line will do
            return f"Not yet: for ({given}) it raises {type(error).__name__}: {error}"
        wanted = puzzle.solution(*copy.deepcopy(case))
        if not same(found, wanted, puzzle.tolerance):
            return f"Not yet: for ({given}) it returns {_shown(found)}. {puzzle.nudge}"
    return f"Right, in all {len(puzzle.cases)} cases."


def same(found: Any, wanted: Any, tolerance: float) -> bool:
    """Return whether two answers agree: integers and words exactly, floats nearly, collections piece by piece."""
    if isinstance(wanted, torch.Tensor):
        alike = isinstance(found, torch.Tensor) and found.shape == wanted.shape
        return alike and torch.allclose(found.double(), wanted.double(), tolerance, tolerance)
    if isinstance(wanted, dict):
        keys = isinstance(found, dict) and found.keys() == wanted.keys()
        return keys and all(same(found[key], wanted[key], tolerance) for key in wanted)
    if isinstance(wanted, list | tuple):
        alike = isinstance(found, list | tuple) and len(found) == len(wanted)
        return alike and all(same(a, b, tolerance) for a, b in zip(found, wanted, strict=True))
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    if getattr(found, "ndim", 0):
        return False  # an array where a number or a word is wanted
    if isinstance(wanted, float) and isinstance(found, int | float):
        return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)


def _shown(value: Any) -> str:
    """Return a value as a reader would type it: plain numbers of six digits, tensors as lists."""
    if isinstance(value, torch.Tensor):
        return _shown(value.tolist())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_shown, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return repr(value)
