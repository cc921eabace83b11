"""Keep a page from loading the same inline script twice.

Sphinx 7.4 lists an inline script again when an extension adds it late (`None` and "" as its file name do not compare
equal), and the second `const` of the same name is an error in the browser's console, on every page.
"""

from __future__ import annotations

from typing import Any


def drop_repeated(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Leave the first of equal scripts in `context`, in order."""
    first: dict[tuple[str, Any], Any] = {}
    for script in context.get("script_files", []):
        first.setdefault((str(script.filename or ""), script.attributes.get("body")), script)
    context["script_files"] = list(first.values())


def setup(app: Any) -> dict[str, bool]:
    """Run after every other extension has added its scripts."""
    app.connect("html-page-context", drop_repeated, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
