"""What a page shows: a chapter's cells and what they print, which `make test` makes its worlds answer anyway.

`test_a_chapter_prints_in_colab_what_it_shows` runs every chapter anew and holds each output against the stored one. A
test that asks something of such an output reads it here, instead of starting the same worlds a second time.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NOT_COMPARED = "nbval-ignore-output"


class StoredCell(NamedTuple):
    """A cell as it is stored. kind: "code" or "markdown"; printed: its output streams, joined."""

    kind: str
    source: str
    printed: str
    tags: frozenset[str]


def printed(chapter: str, command: str) -> str:
    """Return the stored output of the cell of notebooks/`chapter`.ipynb that is `!command`, its error stream included.

    Raises LookupError where no cell, or more than one, runs this command, or where nobody compares what it prints.
    """
    found = [cell for cell in cells(chapter) if cell.source.strip() == f"!{command}"]
    if len(found) != 1:
        raise LookupError(f"chapter {chapter} does not show once, to be compared, what `{command}` prints.")
    return found[0].printed


def cell_with(chapter: str, words: str) -> StoredCell:
    """Return the code cell of notebooks/`chapter`.ipynb with these words in it; LookupError if it is not one."""
    found = [cell for cell in every_cell(chapter) if cell.kind == "code" and words in cell.source]
    if len(found) != 1:
        raise LookupError(f"{len(found)} cells of chapter {chapter} have {words!r} in them, not one.")
    return found[0]


def cells(chapter: str) -> list[StoredCell]:
    """Return the cells of notebooks/`chapter`.ipynb whose outputs are compared."""
    return [cell for cell in every_cell(chapter) if NOT_COMPARED not in cell.tags]


def prose(chapter: str) -> str:
    """Return the Markdown of notebooks/`chapter`.ipynb."""
    return "\n".join(cell.source for cell in every_cell(chapter) if cell.kind == "markdown")


@cache
def every_cell(chapter: str) -> tuple[StoredCell, ...]:
    """Return the cells of notebooks/`chapter`.ipynb."""
    stored = json.loads((ROOT / "notebooks" / f"{chapter}.ipynb").read_text(encoding="utf-8"))["cells"]
    return tuple(
        StoredCell(
            cell["cell_type"],
            "".join(cell["source"]),
            "".join("".join(output.get("text", "")) for output in cell.get("outputs", ())),
            frozenset(cell["metadata"].get("tags", ())),
        )
        for cell in stored
    )


def run_blocks(page: str) -> dict[str, Any]:
    """Run the blocks of Python of book/`page`, one after the other, and return what they define.

    Raises AssertionError where one prints anything else than the block of text that follows it.
    """
    names: dict[str, Any] = {}
    blocks = r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?"
    for code, shown in re.findall(blocks, (ROOT / "book" / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown, code
    return names
