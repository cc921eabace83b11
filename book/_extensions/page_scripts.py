"""Load a page's own script where it is needed, and nowhere else: a page says so by a container of that class."""

from __future__ import annotations

from typing import Any

from docutils import nodes

SCRIPTS = {"puzzles": "puzzle_boxes.js", "envelope": "envelope.js"}  # class of a container -> a file of book/_static


def add_scripts(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Load the scripts of the containers on a page."""
    if doctree is not None:
        classes = {name for box in doctree.findall(nodes.container) for name in box["classes"]}
        for name in sorted(classes & SCRIPTS.keys()):
            app.add_js_file(SCRIPTS[name], loading_method="defer")


def setup(app: Any) -> dict[str, bool]:
    """Add scripts when a page is written."""
    app.connect("html-page-context", add_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
