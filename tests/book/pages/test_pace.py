"""A chapter gets going: a picture or a run on the first two screens, and a run soon after."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from chapters import CHAPTERS

from tools import pace

SHOWN_BY, RUN_BY = 250, 450  # words, unfolded


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_shows_a_picture_and_runs_before_it_explains(path: Path) -> None:
    counted = pace.pace(nbformat.read(path, as_version=4))
    assert counted.first_picture is not None
    assert counted.first_run is not None
    assert min(counted.first_picture, counted.first_run) <= SHOWN_BY
    assert counted.first_run <= RUN_BY


def test_words_are_what_a_reader_reads() -> None:
    assert pace.words("Two words, **and** [a link](https://example.org/a/b) <b>here</b>.") == 7
    assert pace.words("As $a + b$ is,\n\n$$\nx + y\n$$\n\nso is `c d`.\n\n```python\nnot = this\n```\n") == 8
    assert pace.words("<details><summary>Why</summary>\n\nBecause.\n\n</details>") == 2


def test_what_stands_before_the_first_picture_and_the_first_run_is_counted_unfolded() -> None:
    markdown, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    still = nbformat.v4.new_output("display_data", {"image/png": "AAAA", "text/plain": "A line that rises."})
    moving = nbformat.v4.new_output("display_data", {"text/html": '<figure class="moving" id="moving-x">'})
    table = nbformat.v4.new_output("display_data", {"text/html": "<table></table>"})
    chapter = nbformat.v4.new_notebook()
    chapter.cells = [
        markdown("one two three <details>\n\nfour five\n\n</details>"),
        code("x = 1\n\ny = 2", outputs=[table]),
        markdown("six"),
        code("# Drawing: a line", metadata={"tags": ["hide-input"]}, outputs=[still]),
        code("!TORCH=1 python ../scripts/00_tiny.py\n!python again.py"),
        code("# Drawing: it moves", metadata={"tags": ["hide-input"]}, outputs=[moving, still]),
    ]
    assert pace.pace(chapter) == pace.Pace(6, 2, 3, 1, first_picture=4, first_run=3, code_lines=4)
    nothing = pace.pace(nbformat.v4.new_notebook())
    assert (nothing.first_picture, nothing.first_run) == (None, None)
