"""Names of files on pages lead to the files, and listings to their lines as they are today."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import file_links
import pytest
from docutils import nodes
from docutils.utils import new_document

CODE = """import os


class Ring:
    def send(self) -> None:
        to = 1

        return to


def receive() -> None:
    pass
"""
SEND = "def send(self) -> None:\n    to = 1\n\n    return to"
BASE = "https://example.org/muon/blob/main"


@pytest.fixture
def app(tmp_path: Path) -> Any:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "ring.py").write_text(CODE)
    (tmp_path / "_config.yml").write_text("repository: {url: https://example.org/muon/, branch: main}")
    noted: list[str] = []
    env = SimpleNamespace(note_dependency=noted.append, noted=noted)
    return SimpleNamespace(srcdir=tmp_path, env=env)


def page(words: str, path: str, listing: str | None = None) -> nodes.document:
    document = new_document("page")
    paragraph = nodes.paragraph("", "", nodes.Text(words), nodes.literal(path, path), nodes.Text(":"))
    document += [paragraph, *([] if listing is None else [nodes.literal_block(listing, listing)])]
    return document


def addresses(document: nodes.document) -> list[str]:
    return [link["refuri"] for link in document.findall(nodes.reference)]


@pytest.mark.parametrize(("listing", "lines"), [(SEND, "L5-L8"), ("def receive() -> None:\n    pass", "L11-L12")])
def test_a_listing_leads_to_its_lines_wherever_they_are_now(app: Any, listing: str, lines: str) -> None:
    document = page("From ", "scripts/ring.py", listing)
    file_links.link_files(app, document)
    assert addresses(document) == [f"{BASE}/scripts/ring.py#{lines}"]
    assert app.env.noted == ["scripts/ring.py"]


def test_a_name_in_prose_leads_to_the_file_and_what_is_no_file_to_nowhere(app: Any) -> None:
    for path, found in (("scripts/ring.py", [f"{BASE}/scripts/ring.py"]), ("scripts/other.py", []), ("dp/tp", [])):
        document = page("See ", path)
        file_links.link_files(app, document)
        file_links.link_files(app, document)  # what is a link already stays one
        assert addresses(document) == found


def test_a_listing_that_is_no_longer_in_its_file_is_said(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(file_links.logger, "warning", lambda text, *words, **_: said.append(text % words))
    document = page("From ", "scripts/ring.py", "def gone() -> None:\n    pass")
    file_links.link_files(app, document)
    assert addresses(document) == []
    assert said == ["file_links: a listing from scripts/ring.py is not in it"]
