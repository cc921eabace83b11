"""Take how long the cells of each chapter run, one chapter at a time: `make bench NAMES=chapters`.

The first cell of a chapter tells its reader in minutes. Everything in the kernel counts, imports included; nothing is
stored of what the cells print.

python scripts/tools time_chapters --json book/results/chapters.json
python scripts/tools time_chapters 07 12
"""

import time
from pathlib import Path

import nbformat

from distmuon import launch
from muonbook.measure import results
from tools import run_notebooks


def seconds(path: Path) -> float:
    """Return how long the cells of this notebook take. Raises `run_notebooks.ChapterFailed`."""
    chapter = nbformat.read(path, as_version=4)
    began = time.monotonic()
    run_notebooks.execute(chapter, path.stem, run_notebooks.ROOT)
    return time.monotonic() - began


def main() -> None:
    parser = launch.parser(__doc__)
    parser.add_argument("names", nargs="*", help="chapters, by how their names begin: 07 (default: all)")
    folder = run_notebooks.ROOT / "notebooks"
    parser.add_argument("--folder", type=Path, default=folder, help="where they lie (default: notebooks)")
    parser.add_argument("--json", metavar="FILE", help="write what was measured to this file")
    arguments = parser.parse_args()
    launch.check_writable("--json", arguments.json)
    taken = {}
    for path in run_notebooks.chapters(arguments.folder, arguments.names):
        taken[path.stem] = round(seconds(path), 1)
        print(f"{path.stem}: {taken[path.stem]:.0f} s", flush=True)
    if arguments.json:
        results.write(arguments.json, {"seconds": taken})
