"""Print the whole book into one PDF, with Chromium or Chrome: `make pdf`.

Jupyter Book's own `--builder pdfhtml` prints a page that lies in a folder of its own, and so loses every style and
picture; and it wants a browser that it has downloaded itself. Here the one page that Sphinx makes of all lies where its
links point to, and whatever browser is installed prints it.

python scripts/tools print_book --pdf _build/muon-at-scale.pdf
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from distmuon import launch
from muonbook.measure.results import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ALONE = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
FOR_FORMULAS = 30_000  # milliseconds of the page's own clock, until MathJax has set them


def installed_browser() -> str | None:
    """Return the path of the first of BROWSERS that is here; None without one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def printed(source: Path, pdf: Path, browser: str) -> None:
    """Build the book at `source` as one page and print it. Raises UsageError where one of the two does not end well."""
    with tempfile.TemporaryDirectory(prefix="book-") as folder:
        jupyter_book = str(Path(sys.executable).with_name("jupyter-book"))
        words = [jupyter_book, "build", str(source), f"--path-output={folder}", "--builder", "custom"]
        _run([*words, "--custom-builder", "singlehtml", "-q"], "the book was not built as one page")
        pages = Path(folder) / "_build" / "singlehtml"
        whole = pages / "whole.html"
        shutil.copyfile(pages / "book" / "index.html", whole)
        printing = [f"--virtual-time-budget={FOR_FORMULAS}", "--no-pdf-header-footer", f"--print-to-pdf={pdf}"]
        _run([browser, *ALONE, f"--user-data-dir={folder}/profile", *printing, whole.as_uri()], "nothing was printed")


def _run(command: list[str], otherwise: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise launch.UsageError(f"{otherwise}; {command[0]} says:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> None:
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add(
        "--pdf", metavar="FILE", type=Path, default=ROOT / "_build" / "muon-at-scale.pdf", help="(default: %(default)s)"
    )
    add("--source", metavar="FOLDER", type=Path, default=ROOT, help="of the book (default: this project)")
    arguments = parser.parse_args()
    browser = installed_browser()
    if browser is None:
        raise launch.UsageError(
            f"no browser is here to print with (tried: {', '.join(BROWSERS)}); apt-get install chromium."
        )
    arguments.pdf.parent.mkdir(parents=True, exist_ok=True)
    printed(arguments.source, arguments.pdf.resolve(), browser)
    print(f"{arguments.pdf}: {arguments.pdf.stat().st_size / 1e6:.1f} MB")
