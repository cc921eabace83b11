"""All puzzles, for their page: read off the chapters' rooms, so that a new puzzle is on it by itself.

The extension `puzzle_cells` gives the cells of chapters the anchors that the list links to.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import muonbook
from muonbook.markdown_table import table
from muonbook.puzzles import Puzzle
from muonbook.puzzles.five_minutes import FiveMinutes
from tools import set_address

HEADS = ("solved", "chapter", "function", "what it does", "difficulty", "try it")


class ListedPuzzle(NamedTuple):
    """A puzzle as the page shows it.

    chapter: its number. function: what the reader writes. anchor: of its cell, unique in the book. difficulty: in
    words, from the length of the solution.
    """

    chapter: int
    function: str
    anchor: str
    goal: str
    difficulty: str


def every_puzzle() -> list[ListedPuzzle]:
    """Return all puzzles of the book in the order of the chapters, the small ones of a chapter first."""
    found: list[ListedPuzzle] = []
    for room in sorted(module.name for module in pkgutil.iter_modules(muonbook.__path__)):
        if match := re.fullmatch(r"ch(\d\d)", room):
            names = [
                module.name for module in pkgutil.iter_modules(importlib.import_module(f"muonbook.{room}").__path__)
            ]
            for name in ("small_puzzles", "puzzle"):
                if name in names:
                    found += _listed(int(match[1]), importlib.import_module(f"muonbook.{room}.{name}"))
    return found


def _listed(chapter: int, module: ModuleType) -> Iterator[ListedPuzzle]:
    for puzzle in vars(module).values():
        if isinstance(puzzle, FiveMinutes):
            function, lines = puzzle.solution.__name__, solution_lines(puzzle.solution)
            anchor = f"puzzle-{chapter:02d}-{function.replace('_', '-')}"
            yield ListedPuzzle(chapter, function, anchor, puzzle.goal, f"5 minutes, {_counted(lines, 'line')}")
        elif isinstance(puzzle, Puzzle):
            lines, ranks = solution_lines(getattr(module, puzzle.function)), puzzle.dp * puzzle.tp
            difficulty = f"{_counted(lines, 'line')}, {_counted(ranks, 'process')}"
            yield ListedPuzzle(chapter, puzzle.function, f"puzzle-{chapter:02d}", puzzle.goal, difficulty)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")


def solution_lines(solution: Callable[..., Any]) -> int:
    """Return how many lines of code a solution has below its `def`, without documentation, imports and comments."""
    (function,) = ast.parse(text := textwrap.dedent(inspect.getsource(solution))).body
    assert isinstance(function, ast.FunctionDef)
    body = [node for node in function.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    rows = {row for node in body for row in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = text.splitlines()
    return sum(bool(lines[row - 1].partition("#")[0].strip()) for row in rows)


def listed(puzzles: Sequence[ListedPuzzle], notebooks: dict[int, str], here: set_address.Repository) -> str:
    """Return the list as Markdown: a row for each puzzle, with a box to tick that puzzle_boxes.js remembers.

    notebooks: chapter -> the path of its notebook from the root. here: the repository that Colab opens them from.
    """
    rows = []
    for one in puzzles:
        label = f"Solved: {one.function}, chapter {one.chapter}"
        box = f'<input type="checkbox" data-puzzle="{one.anchor}" aria-label="{label}">'
        code, colab = f"[`{one.function}`](#{one.anchor})", f"[Colab]({here.colab(notebooks[one.chapter])})"
        rows.append((box, str(one.chapter), code, one.goal, one.difficulty, colab))
    return table(HEADS, rows)


def page_part(root: Path) -> str:
    """Return what the page of puzzles includes: how many there are, the reader's count, and the table."""
    puzzles = every_puzzle()
    notebooks = {
        int(path.name[:2]): f"notebooks/{path.name}" for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    }
    small = sum(one.difficulty.startswith("5 minutes") for one in puzzles)
    chapters = len({one.chapter for one in puzzles})
    return (
        f"The book has {len(puzzles)} puzzles in {chapters} chapters. You can solve {small} of them in about five "
        f"minutes each, and the other {len(puzzles) - small} take longer.\n\n"
        f":::{{container}} puzzles\n{listed(puzzles, notebooks, set_address.current(root))}:::\n"
    )
