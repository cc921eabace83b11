"""The page of puzzles: every puzzle of the book is on it once, in order, and leads to the cell that holds it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import puzzle_cells
import pytest

from tools import set_address
from tools.pages import puzzle_list

ROOT = Path(__file__).resolve().parents[3]
PUZZLES = puzzle_list.every_puzzle()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def test_every_puzzle_that_a_chapter_defines_is_on_the_page() -> None:
    """Counted anew: in the sources, wherever in a chapter's room they are."""
    defined = 0
    for path in (ROOT / "scripts" / "muonbook").glob("ch*/**/*.py"):
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        defined += sum(isinstance(name, ast.Name) and name.id in ("Puzzle", "FiveMinutes") for name in calls)
    stored = (ROOT / "book" / "figures" / "puzzles.md").read_text(encoding="utf-8")
    boxes = re.findall(r'<input type="checkbox" data-puzzle="([\w-]+)"', stored)
    assert len(boxes) == len(set(boxes)) == len(PUZZLES) == defined
    assert f"The book has {defined} puzzles in" in stored


def test_each_leads_to_its_one_cell_in_the_order_in_which_readers_meet_them() -> None:
    found = []
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                found += [(int(path.name[:2]), puzzle_cells.anchor(f"notebooks/{path.stem}", "".join(cell["source"])))]
    cells = [(chapter, anchor) for chapter, anchor in found if anchor]
    assert cells == [(one.chapter, one.anchor) for one in PUZZLES]


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.anchor)
def test_each_says_in_one_plain_sentence_what_the_function_does(puzzle: puzzle_list.ListedPuzzle) -> None:
    assert re.fullmatch(r"[A-Z][a-z]+ [^.?!:;|]{20,100}\.", puzzle.goal)
    assert re.fullmatch(r"(5 minutes, )?[1-9]\d* lines?(, [1-8] process(es)?)?", puzzle.difficulty)


def test_a_row_opens_its_chapter_in_colab_and_names_its_box() -> None:
    here = set_address.current(ROOT)
    rows = puzzle_list.page_part(ROOT).splitlines()
    (row,) = [row for row in rows if "`gather_cut`" in row]
    assert f"({here.colab('notebooks/08_muon_over_dp.ipynb')})" in row
    assert "[`gather_cut`](#puzzle-08)" in row
    assert 'aria-label="Solved: gather_cut, chapter 8"' in row


@pytest.mark.parametrize(
    ("page", "source", "anchor"),
    [
        ("notebooks/07_virtual_map", "%%writefile my_07.py\ndef fetch(): ...", "puzzle-07"),
        ("notebooks/05_a", "five_minutes.check(small_puzzles.GROUPS, groups_of_rank)", "puzzle-05-groups-of-rank"),
        ("notebooks/10_dp_tp", "%%writefile my_strategy.py\nx = 1", None),
        ("notebooks/05_a", "# five_minutes.check(small_puzzles.GROUPS, groups_of_rank)", None),
        ("book/how_this_works", "%%writefile my_07.py", None),
    ],
)
def test_a_cell_with_a_puzzle_has_an_anchor(page: str, source: str, anchor: str | None) -> None:
    assert puzzle_cells.anchor(page, source) == anchor
