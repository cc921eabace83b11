"""Build the book as `make book` does, cut off from the network, and read its pages. Also a small book with everything
that a chapter may hold, under the real settings, extensions and style, so that these are tested whatever is written."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import yaml
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from muonbook.figures import style
from tools import set_address
from tools.pages import puzzle_list

ROOT = Path(__file__).resolve().parents[2]

# Python reads a file of this name when it starts: in the build, every connection to another machine then fails.
NO_NETWORK = """
import socket

def refuse(*_, **__):
    raise OSError("the book must build without a network")

socket.create_connection = socket.getaddrinfo = socket.socket.connect = refuse
"""

FOLDED = {"tags": ["hide-input"]}
PUZZLES = [
    puzzle_list.ListedPuzzle(7, "cut_it", "puzzle-07-cut-it", "Cut a thing.", "5 minutes, 1 line"),
    puzzle_list.ListedPuzzle(7, "fetch", "puzzle-07", "Fetch it again.", "9 lines, 4 processes"),
]
GLOSSARY = """# Glossary

The words of this small book: a shard, a bucket.

```{glossary}
bucket
  A contiguous run, padded to a multiple of $D$.

DP
data-parallel
  Ranks that see different data.

DP group
  A column of the grid.

Newton–Schulz
  Five steps on a matrix.

rank
  One process.

shard
  The $1/D$ piece of a {term}`bucket`, numbered from <0>.
```
"""

OPENING = r"""# Cut a bucket into shards

[Open in Colab]({link})

Every bucket is cut into shards, and a shard goes to one rank. A data-parallel rank is a DP rank; dp is not, and a
sharded or per-shard thing is not either. The DP group comes first.

## A shard and its bucket

Buckets, `shard`, $shard$, [a shard](https://example.org), the next shard, a rank. Typed Newton-Schulz, meant
Newton–Schulz. Long: `W[I_tp, J]{{U_dp}} -> reduce_scatter -> G[N_dp] -> dp_gather -> M[I_tp, J] -> tp_gather`,
and `scripts/distmuon/strategies/a_name_that_is_longer_than_a_phone_is_wide.py`.

| what | where the name of a column is long enough to fill it | bytes per rank and step | again | and again |
|---|---|---|---|---|
| a shard | `local_range_of_a_long_name` | `global_range_of_a_long_name` | 127,908,127,908 | 189,348 |

$$O = a X + b (X X^\top) X + c (X X^\top)^2 X, \qquad X = G / \lVert G \rVert_F, \qquad (a, b, c) = (3.4, -4.8, 2.0)$$

<details><summary>How many bytes?</summary>

Exactly $(D - 1) / D$ of the bucket.

</details>

### Deeper down

This is the same section, so no shard of it is linked again.

## Another section

Here a shard is linked again, a rank is not.
"""


class Page(HTMLParser):
    """One built page: its ids, its links, what it loads, its images and what it says about itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.meta: dict[str, str] = {}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.add(str(found["id"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag == "img":
            self.images.append(found)
        if tag == "meta":
            self.meta[str(found.get("property") or found.get("name"))] = str(found.get("content"))
        if tag in {"script", "img", "iframe", "source"} and found.get("src"):
            self.loads.append(str(found["src"]))
        if tag == "link" and "stylesheet" in str(found.get("rel")):
            self.loads.append(str(found["href"]))


def published() -> str:
    """Return the address below which the built book's pages say they stand; "" on Hugging Face, if none is set."""
    said = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["html"].get("baseurl", "")
    pages = set_address.current(ROOT).pages
    return f"{said.rstrip('/')}/" if said else f"https://{pages}/" if pages else ""


def build(source: Path, folder: Path) -> Path:
    """Build the book at `source` below `folder` and return its pages. A warning or a look at the network fails."""
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    done = subprocess.run(
        [jupyter_book, "build", source, f"--path-output={folder}", "--all", "-W", "-n", "--keep-going"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "_build" / "html"


def read_pages(site: Path) -> dict[Path, Page]:
    """Return path -> Page for every page of a built book."""
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}


def write_sample(folder: Path, link: str) -> Path:
    """Write the small book into `folder`: a glossary, and a chapter with wide things, two pictures and formulas.

    link: what opens the chapter in Colab.
    """
    settings = ("_config.yml", "book/_extensions", "book/_static", "book/figures/social_card.png")
    for name in (*settings, "book/references.bib"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, target)
    pages = ("notebooks/07_virtual_map", "book/puzzles", "book/glossary")
    toc = "format: jb-book\nroot: book/index\nchapters:\n" + "".join(f"  - file: {page}\n" for page in pages)
    (folder / "_toc.yml").write_text(toc)
    page_one = "# A small book\n\nIts page one has no formula, only a shard.\n\n![A card](card.png)\n"
    (folder / "book" / "index.md").write_text(page_one)
    style.save(_card("A card"), folder / "book" / "card.png", "A card")
    (folder / "book" / "glossary.md").write_text(GLOSSARY, encoding="utf-8")
    notebook = "notebooks/07_virtual_map.ipynb"
    listed = puzzle_list.listed(PUZZLES, {7: notebook}, set_address.current(ROOT))
    part = f"# Puzzles\n\nA list of puzzles, each with a box.\n\n:::{{container}} puzzles\n{listed}:::\n"
    (folder / "book" / "puzzles.md").write_text(part, encoding="utf-8")
    wide = new_output("stream", name="stdout", text="rank 0  " + "0123456789 " * 30 + "\n")
    cells = [
        new_markdown_cell(OPENING.format(link=link)),
        new_code_cell("!python worker.py \\\n    --dp 4", execution_count=1, outputs=[wide], id="run"),
        new_code_cell("show()", execution_count=2, outputs=[_picture("First"), _picture("Second")], id="see"),
        new_code_cell(
            "# Drawing: a table & more\nx()", execution_count=3, outputs=[_html()], id="fold", metadata=FOLDED
        ),
        new_code_cell("%%writefile my_07.py\ndef fetch(): ...", execution_count=4, outputs=[], id="fetch"),
        new_code_cell("five_minutes.check(small_puzzles.CUT, cut_it)", execution_count=5, outputs=[], id="cut"),
    ]
    language = {"name": "python", "pygments_lexer": "ipython3"}
    chapter = new_notebook(cells=cells, metadata={"language_info": language})
    (folder / "notebooks").mkdir()
    nbformat.write(chapter, folder / notebook)
    return folder


def _picture(name: str) -> nbformat.NotebookNode:
    """Return what `notebook.picture` leaves in a cell's output."""
    alt = f'{name} picture: a card that says "{name}" & nothing else.'
    image = base64.b64encode(style.png(_card(name), alt)).decode()
    return new_output("display_data", {"image/png": image, "text/plain": alt})


def _html() -> nbformat.NotebookNode:
    """Return an output that comes as HTML, large enough to be a slab."""
    return new_output("display_data", {"text/html": "<p>A paragraph of HTML.</p>" * 3, "text/plain": "Paragraphs."})


def _card(name: str) -> Figure:
    return style.page([style.text_block(name, style.TITLE), style.text_block("Nothing else. " * 9)])
