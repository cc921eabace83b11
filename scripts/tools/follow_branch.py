"""Let the notebooks of this tree fetch another branch, and links open them in Colab from it: for the published book.

A page shows what a commit printed, and the branch main goes on. So the workflow that publishes the book keeps a branch
with the commit that the pages were built from; Colab opens a page's notebook there, and its first cell fetches the same
branch. Until then, and wherever no workflow runs, notebooks follow main.

python scripts/tools follow_branch published
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from distmuon import launch
from tools import run_notebooks, set_address


def reopened(text: str, here: set_address.Repository, branch: str) -> str:
    """Return `text` with every link that opens a notebook of ours in Colab opening it from this branch."""
    opens = re.compile(re.escape(here.forms["colab"]) + r"/blob/[\w./-]+?/(?=notebooks/)")
    return opens.sub(here.colab("", branch), text)


def follow(path: Path, here: set_address.Repository, branch: str) -> None:
    """Rewrite one notebook: its first cell, and the links of its prose."""
    chapter = nbformat.read(path, as_version=4)
    run_notebooks.share_first_cell(chapter, path.stem, here.url, branch)
    for cell in chapter.cells:
        if cell.cell_type == "markdown":
            cell.source = reopened(cell.source, here, branch)
    run_notebooks.normalize(chapter)
    run_notebooks.replace(path, nbformat.writes(chapter, version=4) + "\n")


def main() -> None:
    parser = launch.parser(__doc__)
    parser.add_argument("branch", help="which branch of the published repository they follow")
    parser.add_argument(
        "--folder", type=Path, default=run_notebooks.ROOT, help="with notebooks/ and book/ (default: this tree)"
    )
    arguments = parser.parse_args()
    if re.fullmatch(r"[\w][\w./-]*", arguments.branch, re.ASCII) is None:
        raise launch.UsageError(f"{arguments.branch!r} is no name of a branch; name one such as published.")
    here = set_address.current(run_notebooks.ROOT)
    notebooks = run_notebooks.chapters(arguments.folder / "notebooks", [])
    for path in notebooks:
        follow(path, here, arguments.branch)
    for path in sorted((arguments.folder / "book").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (changed := reopened(text, here, arguments.branch)) != text:
            run_notebooks.replace(path, changed)
    print(f"{len(notebooks)} notebooks follow the branch {arguments.branch}.")
