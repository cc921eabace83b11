"""Let autodoc read the engine's docstrings, which are plain prose, for the API reference, book/api.md.

A docstring names what it explains at the beginning of a line, and indents what goes on:

    params: a model, or groups of parameters,
        as for any torch optimizer.

That, and a column of names with two spaces or more behind them, becomes a definition list; other indented lines become
code. Within prose, `names` in backquotes, "values" and --options become code, and names of which the page has an entry
become links.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = "book/api.md"
ENTRY = re.compile(r"^\.\. auto(\w+):: +([\w.]+)", re.MULTILINE)
NAME = r"[a-z_]\w*"
TERMS = re.compile(rf"({NAME}(?:, {NAME})*(?: to {NAME})?(?:,? and from {NAME} on)?)(?:: +| {{2,}})(?=\S)")
CODE = re.compile(r"`([^`]+)`|((?:\w+=)?\"[^\"\s]*\"|(?<![\w-])--[a-z][\w-]*)")


def entries(page: str) -> list[str]:
    """Return the full names that a page documents, in its order."""
    return [name for _, name in ENTRY.findall(page)]


def links_to(page: str) -> dict[str, str]:
    """Return {as docstrings call it: full name} of what a page documents: "run", "launch.run"; a module has a dot."""
    found: dict[str, str] = {}
    for kind, name in ENTRY.findall(page):
        parts = name.split(".")
        last = len(parts) - (kind == "module")
        found |= {".".join(parts[first:]): name for first in range(last)}
    return found


def as_rst(lines: Sequence[str], links: Mapping[str, str]) -> list[str]:
    """Return a docstring, without indentation, as reStructuredText. links: see `links_to`."""
    found: list[str] = []
    rest = list(lines)
    while rest:
        if not rest[0].strip():
            found.append(rest.pop(0).strip())
        elif rest[0].startswith(" "):
            block = textwrap.dedent("\n".join(_indented(rest, blank=True))).splitlines()
            inner = as_rst(block, links) if TERMS.match(block[0]) else ["::", "", *_deeper(block)]
            found += ["", *inner, ""]
        elif match := TERMS.match(rest[0]):
            first = rest.pop(0)[match.end() :]
            body = textwrap.dedent("\n".join(_indented(rest))).splitlines()
            found += ["", _names(match[1]), *_deeper(_body([first, *body], links)), ""]
        else:
            first = rest.pop(0)
            found += _body([first, *_paragraph(rest, first)], links)
    return found


def _body(lines: Sequence[str], links: Mapping[str, str]) -> list[str]:
    """Return lines of which the first is prose, whatever it looks like, and the others may be anything."""
    rest = list(lines[1:])
    text = " ".join([lines[0], *_paragraph(rest, lines[0])])
    return [inline(text, links), *as_rst(rest, links)]


def _paragraph(rest: list[str], before: str) -> list[str]:
    """Take lines of a paragraph from the front of `rest`: up to an empty line, an indented one, or names after a stop.

    before: the paragraph's first line. A word with a colon in the middle of a sentence may begin a line by chance.
    """
    taken = [before]
    while rest and rest[0].strip() and not rest[0].startswith(" "):
        if TERMS.match(rest[0]) and taken[-1].endswith((".", ":", ";")):
            break
        taken.append(rest.pop(0))
    return taken[1:]


def _indented(rest: list[str], blank: bool = False) -> list[str]:
    """Take indented lines from the front of `rest`. blank: also empty lines that are followed by more of them."""
    taken: list[str] = []
    while rest and (rest[0].startswith(" ") or (blank and not rest[0] and rest[1:] and rest[1].startswith(" "))):
        taken.append(rest.pop(0))
    return taken


def _deeper(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def _names(names: str) -> str:
    """Return the term of a definition: "lr, betas" or "lr to eps", with the names of code as code."""
    return re.sub(r"\w+", lambda m: m[0] if m[0] in ("and", "from", "on", "to") else f"``{m[0]}``", names)


def inline(text: str, links: Mapping[str, str]) -> str:
    """Return prose as reStructuredText: nothing in it is markup but `names` in backquotes."""
    found, end = "", 0
    for match in CODE.finditer(text):
        code = match[1] or match[2]
        found += _plain(text[end : match.start()])
        found += rf"\ :py:obj:`~{links[code]}`\ " if code in links else rf"\ ``{code}``\ "
        end = match.end()
    return found + _plain(text[end:])


def _plain(text: str) -> str:
    return re.sub(r"([\\*_|`])", r"\\\1", text)


def find_engine(app: Any) -> None:
    """Let autodoc import the engine of this clone, and read which names the page documents."""
    page = Path(app.srcdir, PAGE)
    app.api_links = links_to(page.read_text(encoding="utf-8")) if page.exists() else {}
    sys.path.insert(0, str(Path(app.srcdir, "scripts")))


def rewrite(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Replace a docstring by what it says in reStructuredText; nothing links to itself, nor an argument to an entry.

    What autodoc takes for the docstring of a constant is that of its type.
    """
    if what == "data":
        lines.clear()
    arguments = inspect.signature(thing).parameters if what in ("function", "method") else {}
    links = {short: full for short, full in app.api_links.items() if full != name and short not in arguments}
    lines[:] = [*as_rst(lines, links), ""]


def setup(app: Any) -> dict[str, bool]:
    """Add autodoc, and rewrite every docstring that it finds."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("builder-inited", find_engine)
    app.connect("autodoc-process-docstring", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
