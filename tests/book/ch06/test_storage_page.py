"""The page book/storage.md: its examples print what stands under them, and what it lists from the engine is there."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from operator import attrgetter
from typing import Any

import worlds

PAGE = (worlds.ROOT / "book" / "storage.md").read_text(encoding="utf-8")


def test_examples_print_what_stands_under_them() -> None:
    space: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == PAGE.count("```python\n") == 4
    for code, wanted in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, space)
        assert printed.getvalue() == wanted


def test_listings_are_of_the_engine() -> None:
    listings = re.findall(
        r"```{literalinclude} \.\./scripts/([\w/]+)\.py\n:pyobject: ([\w.]+)\n(?::dedent:\n)?```", PAGE
    )
    assert len(listings) == PAGE.count("{literalinclude}")
    for module, name in listings:
        assert attrgetter(name)(importlib.import_module(module.replace("/", "."))).__module__ == module.replace(
            "/", "."
        )
