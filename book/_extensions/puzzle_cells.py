"""Give each cell with a puzzle an anchor, so that the page of all puzzles can link to it.

A chapter's puzzle is the cell that writes `my_NN.py`, with the anchor `puzzle-NN`. A small one is the cell that hands a
function to `five_minutes.check`, with the anchor `puzzle-NN-name-of-the-function`. `[words](#puzzle-NN)` then leads
there from any page, and a strict build fails where there is no such cell.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes

LARGE = re.compile(r"%%writefile my_(\d\d)\.py\b")
SMALL = re.compile(r"^five_minutes\.check\(\s*[\w.]+,\s*(\w+)\s*\)", re.MULTILINE)
CHAPTER = re.compile(r"notebooks/(\d\d)")


def anchor(page: str, source: str) -> str | None:
    """Return the anchor of a cell with this source on a chapter's page, or None where it holds no puzzle."""
    chapter = CHAPTER.match(page)
    if chapter is None:
        return None
    if large := LARGE.match(source):
        return f"puzzle-{large[1]}"
    small = SMALL.search(source)
    return f"puzzle-{chapter[1]}-{small[1].replace('_', '-')}" if small else None


def mark_cells(app: Any, doctree: nodes.document) -> None:
    """Give the cells their anchors, and tell Sphinx of them."""
    page = app.env.docname
    for cell in doctree.findall(nodes.container):
        if cell.get("nb_element") != "cell_code":
            continue
        code = next(cell.findall(nodes.literal_block), None)
        name = anchor(page, code.astext()) if code is not None else None
        if name:
            cell["ids"].append(name)
            app.env.get_domain("std").note_hyperlink_target(name, page, name)


def setup(app: Any) -> dict[str, bool]:
    """Mark cells as soon as a page is read."""
    app.connect("doctree-read", mark_cells)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
