"""A book on paper: one file, with its pictures, or a sentence why not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import built_book
import pytest

from tools import set_address

TOOLS = [sys.executable, str(built_book.ROOT / "scripts" / "tools"), "print_book"]


@pytest.mark.usefixtures("browser")
def test_a_book_is_printed_whole_with_its_pictures(tmp_path: Path) -> None:
    link = set_address.current(built_book.ROOT).colab("notebooks/07_virtual_map.ipynb", branch="published")
    (folder := tmp_path / "sample").mkdir()
    source, pdf = built_book.write_sample(folder, link), tmp_path / "out" / "book.pdf"
    done = subprocess.run([*TOOLS, "--source", source, "--pdf", pdf], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"{re.escape(str(pdf))}: \d+\.\d MB\n", done.stdout)
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", content)) >= 3
    assert b"/Subtype /Image" in content


def test_without_a_browser_it_says_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(TOOLS, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no browser is here to print with")
