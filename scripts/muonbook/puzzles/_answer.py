"""The reader's file: reading it, loading it, and what can be said of it before any rank is started."""

from __future__ import annotations

import ast
import difflib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from distmuon import launch


class Answer(NamedTuple):
    """name: the file's own, without folders, because that is all a message may say. text: its source."""

    name: str
    text: str


def read(path: str | Path) -> Answer:
    """Return the reader's file. Raises UsageError where it is not there or is not text."""
    path = Path(path)
    if not path.is_file():
        raise launch.UsageError(
            f"--check {path}: there is no such file; run the cell that begins with %%writefile first."
        )
    try:
        return Answer(path.name, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise launch.UsageError(f"--check {path}: this is not a Python file in UTF-8.") from error


def examine(answer: Answer, function: str) -> list[str]:
    """Return what keeps the file from being tried: a syntax error, no such function, a starter as it was handed out."""
    try:
        tree = ast.parse(answer.text)
        compile(tree, answer.name, "exec")
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        return [f"Python cannot read {answer.name}{line}: {what}."]
    names = list(_names(tree))
    if function not in names and "*" not in names:
        return [missing(answer.name, function, names)]
    last = next((node for node in reversed(tree.body) if getattr(node, "name", "") == function), None)
    if isinstance(last, ast.FunctionDef) and _is_starter(last):
        return [f"{unwritten(function)} ({answer.name}, line {last.body[-1].lineno})."]
    return []


def load(answer: Answer, function: str) -> Any:
    """Run the file as a module and return its function; None where it defines no such thing."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses look their module up
    exec(compile(answer.text, answer.name, "exec"), module.__dict__)
    found = getattr(module, function, None)
    return found if callable(found) else None


def missing(name: str, function: str, names: list[str]) -> str:
    """Return the complaint that the file has no such function, with the one that may have been meant."""
    close = difflib.get_close_matches(function, names, n=1)
    return f"{name} defines no {function}." + (f" Is {close[0]} what you meant by it?" if close else "")


def unwritten(function: str) -> str:
    return f"{function} is not written yet: it still raises NotImplementedError"


def _is_starter(function: ast.FunctionDef) -> bool:
    """Return whether nothing stands in the function but documentation and `raise NotImplementedError`."""
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Raise):
        return False
    raised = body[0].exc.func if isinstance(body[0].exc, ast.Call) else body[0].exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that the file may bind for others to see; "*" for an import of everything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
