"""Say on a folded cell what is inside: its first line is a comment, and the fold shows that line as its summary.

Where only the output is folded, the code above it says of what. Without this, every fold of the book reads "Show code
cell source". The comment is the only place for the words: nothing has to be repeated in a cell's metadata, and in
Jupyter the same line heads the code.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes

PRINTED = "What it prints"
COMMENT = re.compile(r"# *(?:@title +)?(\S.*)")  # Colab shows what follows `@title` above a cell that it folds


def summary(source: str) -> str | None:
    """Return the words of the comment that `source` begins with, or None where there is none."""
    found = COMMENT.match(source)
    return found[1].strip() if found else None


def name_folds(app: Any, doctree: nodes.document) -> None:
    """Give each folded cell its summary, before MyST-NB wraps the code in it."""
    for cell in doctree.findall(lambda node: "hide_mode" in getattr(node, "attributes", {})):
        code = next(cell.findall(nodes.literal_block), None)
        named = PRINTED if cell["hide_mode"] == "output" else None
        words = named or (summary(code.astext()) if code is not None else None)
        if words:
            cell["prompt_show"] = cell["prompt_hide"] = words


def setup(app: Any) -> dict[str, bool]:
    """Name the folds as soon as a page is read."""
    app.connect("doctree-read", name_folds)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
