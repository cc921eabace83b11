"""The page book/storage.md: its examples print what stands under them, and what it lists from the engine is there."""

from __future__ import annotations

import importlib
import re
from operator import attrgetter

import stored_pages
import worlds

PAGE = (worlds.ROOT / "book" / "storage.md").read_text(encoding="utf-8")


def test_examples_print_what_stands_under_them() -> None:
    assert PAGE.count("```python\n") == PAGE.count("```\n\n```text\n") == 4
    stored_pages.run_blocks("storage.md")


def test_listings_are_of_the_engine() -> None:
    listings = re.findall(
        r"```{literalinclude} \.\./scripts/([\w/]+)\.py\n:pyobject: ([\w.]+)\n(?::dedent:\n)?```", PAGE
    )
    assert len(listings) == PAGE.count("{literalinclude}")
    for module, name in listings:
        assert attrgetter(name)(importlib.import_module(module.replace("/", "."))).__module__ == module.replace(
            "/", "."
        )
