"""The book as a reader gets it: it builds without a warning or a network, and its pages hold together on their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Python reads a file of this name when it starts: in the build, every connection to another machine then fails.
NO_NETWORK = """
import socket

def refuse(*_, **__):
    raise OSError("the book must build without a network")

socket.create_connection = socket.getaddrinfo = socket.socket.connect = refuse
"""


class Page(HTMLParser):
    """One built page: its ids, its links, what it loads, its images and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.add(str(found["id"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag == "img":
            self.images.append(found)
        if tag in {"script", "img", "iframe", "source"} and found.get("src"):
            self.loads.append(str(found["src"]))
        if tag == "link" and "stylesheet" in str(found.get("rel")):
            self.loads.append(str(found["href"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built book. Any warning fails the build, and so does any look at the network."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    done = subprocess.run(
        [jupyter_book, "build", ROOT, f"--path-output={folder}", "--all", "-W", "-n", "--keep-going"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "_build" / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}


def test_the_book_builds_strictly_and_has_every_page_of_its_contents(site: Path) -> None:
    entries = re.findall(r"(?:root|file): (\S+)", (ROOT / "_toc.yml").read_text(encoding="utf-8"))
    assert "book/index" in entries
    for entry in entries:
        assert (site / f"{entry}.html").is_file(), entry
    assert "book/index.html" in (site / "index.html").read_text(encoding="utf-8"), "the bare address leads to page one"


def test_a_page_loads_nothing_from_another_machine(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert [load for load in page.loads if urlsplit(load).netloc] == [], path


def test_everything_a_page_loads_or_links_to_inside_the_book_exists(site: Path, pages: dict[Path, Page]) -> None:
    checked = 0
    for path, page in pages.items():
        for target in page.links + page.loads:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert file.is_file(), f"{path.relative_to(site)} points at {target}"
            if url.fragment and file in pages:
                assert unquote(url.fragment) in pages[file].ids, f"{path.relative_to(site)} points at {target}"
            checked += 1
    assert checked > 50


def test_every_image_says_in_words_what_it_shows(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert [image for image in page.images if not (image.get("alt") or "").strip()] == [], path


def test_the_theme_knows_its_mode_so_that_no_page_logs_an_error(pages: dict[Path, Page], site: Path) -> None:
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert path == site / "index.html" or 'data-default-mode="auto"' in text, path


def test_no_page_declares_the_same_script_twice(pages: dict[Path, Page]) -> None:
    for path in pages:
        inline = re.findall(r"<script>(.+?)</script>", path.read_text(encoding="utf-8"), re.DOTALL)
        assert len(inline) == len(set(inline)), path
