"""What a chapter's page shows a command to print: the answer of worlds that `make test` starts anyway.

`test_a_chapter_prints_in_colab_what_it_shows` runs every chapter anew and holds each output against the stored one. A
test that asks something of such an output reads it here, instead of starting the same worlds a second time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOT_COMPARED = "nbval-ignore-output"


def printed(chapter: str, command: str) -> str:
    """Return the stored output of the cell of notebooks/`chapter`.ipynb that is `!command`, its error stream included.

    Raises LookupError where no cell, or more than one, runs this command, or where nobody compares what it prints.
    """
    found = [cell for cell in cells(chapter) if "".join(cell["source"]).strip() == f"!{command}"]
    if len(found) != 1:
        raise LookupError(f"chapter {chapter} does not show once, to be compared, what `{command}` prints.")
    return "".join("".join(output["text"]) for output in found[0]["outputs"])


def cells(chapter: str) -> list[dict[str, Any]]:
    """Return the cells of notebooks/`chapter`.ipynb whose outputs are compared."""
    return [cell for cell in every_cell(chapter) if NOT_COMPARED not in cell["metadata"].get("tags", [])]


def every_cell(chapter: str) -> list[dict[str, Any]]:
    """Return the cells of notebooks/`chapter`.ipynb."""
    return json.loads((ROOT / "notebooks" / f"{chapter}.ipynb").read_text(encoding="utf-8"))["cells"]
