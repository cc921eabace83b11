"""Five-minute puzzles: right is right, wrong says where, and every chapter's solution solves its own."""

import importlib
import json
import pkgutil
import re
from typing import Any

import numpy as np
import pytest
import torch
import worlds

import muonbook
from muonbook.puzzles.five_minutes import FiveMinutes, check, same, verdict

DOUBLE = FiveMinutes(lambda n, extra=0: 2 * n + extra, cases=((1,), (3, 1)), nudge="Twice is twice.", goal="Double.")


def small_puzzles() -> list[tuple[str, FiveMinutes]]:
    """Return the name and the puzzle of every chapter's small_puzzles."""
    found = []
    for chapter in pkgutil.iter_modules(muonbook.__path__):
        if not re.fullmatch(r"ch\d\d", chapter.name):
            continue
        room = importlib.import_module(f"muonbook.{chapter.name}")
        if "small_puzzles" in [module.name for module in pkgutil.iter_modules(room.__path__)]:
            module = importlib.import_module(f"muonbook.{chapter.name}.small_puzzles")
            found += [(f"{chapter.name}.{n}", p) for n, p in vars(module).items() if isinstance(p, FiveMinutes)]
    return found


PUZZLES = small_puzzles()


def test_a_right_answer_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    check(DOUBLE, lambda n, extra=0: n + n + extra)
    assert capsys.readouterr().out == "Right, in all 2 cases.\n"


def test_a_wrong_answer_is_shown_what_it_gave_and_not_what_is_wanted() -> None:
    assert verdict(DOUBLE, lambda n, extra=0: n * 2) == "Not yet: for (3, 1) it returns 6. Twice is twice."
    assert verdict(DOUBLE, lambda n: None) == "Not yet: for (1) it returns None. Twice is twice."


def test_an_answer_that_raises_is_told_so_in_the_same_line() -> None:
    assert verdict(DOUBLE, lambda n: n // 0).startswith("Not yet: for (1) it raises ZeroDivisionError: ")
    assert verdict(DOUBLE, lambda: 1).startswith("Not yet: for (1) it raises TypeError: ")


def test_an_answer_cannot_spoil_the_arguments_of_the_next_case() -> None:
    puzzle = FiveMinutes(sum, cases=(([1, 2],),), nudge="Add.", goal="Add.")
    assert verdict(puzzle, lambda numbers: numbers.clear() or 3) == "Right, in all 1 cases."
    assert puzzle.cases == (([1, 2],),)


@pytest.mark.parametrize(
    ("found", "wanted", "alike"),
    [
        (1.0 + 1e-9, 1.0, True), (1, 1.0, True), (1.01, 1.0, False), (float("nan"), 1.0, False), (True, 1, False),
        (None, 1.0, False), (torch.tensor(2.0), 2.0, True), (torch.tensor([1.0, 2.0]), [1.0, 2.0], False),
        ([1, (2, 3)], (1, [2, 3]), True), ([1], [1, 2], False), ({"a": 1}, {"a": 1}, True), ({"b": 1}, {"a": 1}, False),
        (torch.ones(2), torch.ones(2), True), (torch.ones(2, 1), torch.ones(2), False), ("dp", "dp", True),
        (torch.ones(2), 1.0, False), (np.arange(3), 2, False), (np.float64(2.0), 2.0, True),
        (2, 2, True), (2.0, 2, True), (1, True, False), (torch.zeros(0), torch.zeros(0), True),
    ],
)  # fmt: skip
def test_answers_are_compared_by_what_they_are(found: Any, wanted: Any, alike: bool) -> None:
    assert same(found, wanted, 1e-6) is alike


@pytest.mark.parametrize(("name", "puzzle"), PUZZLES, ids=[name for name, _ in PUZZLES])
def test_every_solution_solves_its_puzzle_and_every_stub_does_not(name: str, puzzle: FiveMinutes) -> None:
    assert verdict(puzzle, puzzle.solution) == f"Right, in all {len(puzzle.cases)} cases."
    assert len(puzzle.cases) >= 2
    (path,) = (worlds.ROOT / "notebooks").glob(f"{name[2:4]}_*.ipynb")
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    short = name.partition(".")[2]
    (stub,) = [cell for cell in cells if f"small_puzzles.{short}, " in cell]
    space: dict[str, Any] = {"torch": torch}
    exec(re.sub(r"(?m)^(from muonbook|five_minutes\.).*$", "", stub), space)
    answer = space[re.findall(r"^def (\w+)", stub, re.MULTILINE)[-1]]
    assert verdict(puzzle, answer).startswith("Not yet: "), "the stub is right already"
    assert any(f"small_puzzles.{puzzle.solution.__name__}, fold=" in cell for cell in cells), "no folded solution"
