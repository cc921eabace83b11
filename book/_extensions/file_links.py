"""Link the names of files to the files, and every listing to the lines that it shows.

Inline code that is the path of a file of the project becomes a link to it in the repository. Where it introduces a
listing, "From `scripts/distmuon/optim/muon.py`:", the link leads to the listing's lines, which are looked up when the
book is built, so that no page stores a number that the next edit makes wrong. A listing that is no longer in its file
is a warning, and a strict build fails.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx.util import logging

INTRODUCES = "From "
logger = logging.getLogger(__name__)


def lines_of(listing: str, text: str) -> tuple[int, int] | None:
    """Return the first and the last line, from 1, of a listing in a file's text, which may indent it; None: nowhere."""
    wanted = listing.strip("\n").split("\n")
    there = text.split("\n")
    for start, line in enumerate(there):
        part = there[start : start + len(wanted)]
        if line.endswith(wanted[0]) and textwrap.dedent("\n".join(part)).split("\n") == wanted:
            return start + 1, start + len(wanted)
    return None


def listing_after(paragraph: nodes.Node) -> nodes.literal_block | None:
    """Return the listing that a paragraph introduces, if it is one that does."""
    if not isinstance(paragraph, nodes.paragraph) or not paragraph.astext().startswith(INTRODUCES):
        return None
    following = paragraph.next_node(descend=False, siblings=True)
    return following if isinstance(following, nodes.literal_block) else None


def link_files(app: Any, doctree: nodes.document) -> None:
    """Make the links of one page."""
    root = Path(app.srcdir)
    repository = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))["repository"]  # wherever it lies
    base = f"{repository['url'].rstrip('/')}/blob/{repository['branch']}"
    for code in list(doctree.findall(nodes.literal)):
        path = code.astext()
        if "/" not in path or isinstance(code.parent, nodes.reference) or not (root / path).is_file():
            continue
        address = f"{base}/{path}"
        listing = listing_after(code.parent)
        if listing is not None:
            app.env.note_dependency(path)  # an edit of the file moves its lines
            found = lines_of(listing.astext(), (root / path).read_text(encoding="utf-8"))
            if found is None:
                logger.warning("file_links: a listing from %s is not in it", path, location=listing)
                continue
            address += f"#L{found[0]}-L{found[1]}"
        code.replace_self(nodes.reference("", "", code.deepcopy(), refuri=address))


def setup(app: Any) -> dict[str, bool]:
    """Link the files as soon as a page is read."""
    app.connect("doctree-read", link_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
