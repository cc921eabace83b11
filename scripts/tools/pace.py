"""Print how each chapter gets going: its words, its pictures, and the word at which it first draws and first runs.

Words are those of the Markdown cells that a reader reads: no code, no inside of a formula (a word each), no address of
a link, no tag. What `<details>` fold away counts as folded; the places of the first picture and the first run are
counted without it. A picture is one that a cell draws; one that moves is a player (muonbook.figures.player). Lines of
code are those on the page without a click, empty ones aside. A run is a cell on the page that has printed or drawn.

python scripts/tools pace
python scripts/tools pace 07 12
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode

from distmuon import launch
from tools import run_notebooks

NOT_WORDS = (  # in this order
    (r"(?ms)^ *(```+|~~~+).*?^ *\1 *$", " "),
    (r"(?s)\$\$.*?\$\$", " x "),
    (r"\$[^$\n]+\$", " x "),
    (r"\]\([^)]*\)", "]"),
    (r"<[^>]+>", " "),
)
FOLDED = re.compile(r"<details\b.*?</details>", re.DOTALL)
OUT_OF_SIGHT = {"hide-input", "remove-input", "hide-cell", "remove-cell"}  # tags of cells whose code is not on the page


class Pace(NamedTuple):
    """What one chapter counts. first_picture, first_run: unfolded words before it, None where there is none."""

    words: int
    folded: int
    pictures: int
    moving: int
    first_picture: int | None
    first_run: int | None
    code_lines: int


def words(markdown: str) -> int:
    """Return how many words of a Markdown text are read."""
    for pattern, instead in NOT_WORDS:
        markdown = re.sub(pattern, instead, markdown)
    return len(markdown.split())


def pace(chapter: NotebookNode) -> Pace:
    """Count a chapter as it is stored."""
    read = folded = pictures = moving = code_lines = 0
    first_picture = first_run = None
    for cell in chapter.cells:
        if cell.cell_type == "markdown":
            behind = sum(words(part) for part in FOLDED.findall(cell.source))
            read, folded = read + words(cell.source), folded + behind
            continue
        seen = not OUT_OF_SIGHT & set(cell.metadata.get("tags", []))
        if first_run is None and seen and cell.get("outputs"):
            first_run = read - folded
        kinds = [run_notebooks.picture_kind(output) for output in cell.get("outputs", [])]
        moving += kinds.count("moving")
        pictures += len(kinds) - kinds.count("")
        if first_picture is None and pictures:
            first_picture = read - folded
        if seen:
            code_lines += sum(bool(line.strip()) for line in cell.source.splitlines())
    return Pace(read, folded, pictures, moving, first_picture, first_run, code_lines)


def main() -> None:
    parser = launch.parser(__doc__)
    parser.add_argument("names", nargs="*", help="chapters, by how their names begin: 07 (default: all)")
    folder = run_notebooks.ROOT / "notebooks"
    parser.add_argument("--folder", type=Path, default=folder, help="where they lie (default: notebooks)")
    arguments = parser.parse_args()
    heads = f"{'words':>7s}{'folded':>8s}{'pictures':>10s}{'moving':>8s}{'1st pic':>9s}{'1st run':>9s}{'code':>6s}"
    print(f"{'chapter':32s}{heads}")
    counted = []
    for path in run_notebooks.chapters(arguments.folder, arguments.names):
        one = pace(nbformat.read(path, as_version=4))
        counted.append(one)
        first = ["-" if place is None else str(place) for place in (one.first_picture, one.first_run)]
        numbers = f"{one.words:7,d}{one.folded:8,d}{one.pictures:10d}{one.moving:8d}"
        print(f"{path.stem:32s}{numbers}{first[0]:>9s}{first[1]:>9s}{one.code_lines:6d}")
    total = [sum(column) for column in zip(*(one[:4] for one in counted), strict=True)]
    lines = sum(one.code_lines for one in counted)
    print(f"{'together':32s}{total[0]:7,d}{total[1]:8,d}{total[2]:10d}{total[3]:8d}{'':18s}{lines:6d}")
