"""Puzzles: every solution that is shown is accepted, every wrong answer is told what is wrong, kindly and quickly.

A wrong answer for a chapter's puzzle is a function <what_is_wrong> in tests/book/chNN/wrong_answers.py. Above it stands
`# expect: <part of the complaint>`, with ` ...` for what may be anything; the tables below find it.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import puzzle_workers as workers
import pytest
import torch
import worlds

import muonbook
from distmuon import launch
from muonbook import puzzles
from muonbook.ch05 import puzzle as ring_all_reduce
from muonbook.puzzles import Puzzle, runner

CHAPTERS = sorted(path.parent.name for path in Path(muonbook.__path__[0]).glob("ch*/puzzle.py"))
EXPECTED = re.compile(r"^# expect: (\S.*)\n(?:# .*\n)*(?:def )?(\w+)", re.MULTILINE)  # what is said, what is wrong
WRONG = {
    path: EXPECTED.findall(path.read_text(encoding="utf-8"))
    for path in sorted(Path(__file__).resolve().parents[1].glob("ch*/wrong_answers.py"))
}
Capture = pytest.CaptureFixture[str]


def said_by(capture: Capture) -> str:
    """Return what was printed as one line: where a long complaint is broken is not what is tested."""
    return " ".join(capture.readouterr().out.split())


def puzzle_of(chapter: str) -> Puzzle:
    return importlib.import_module(f"muonbook.{chapter}.puzzle").PUZZLE


# ---- The table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_solution_is_accepted(chapter: str, tmp_path: Path, capsys: Capture) -> None:
    puzzle = puzzle_of(chapter)
    answer = tmp_path / "my_answer.py"
    answer.write_text(f"from muonbook.{chapter}.puzzle import {puzzle.function}\n")
    code = puzzles.check(puzzle, answer)
    said = capsys.readouterr().out
    assert code == 0, said
    assert re.fullmatch(r"Solved: \S[^\n]*[.!]\n", said)


@pytest.mark.parametrize(
    ("path", "expected", "name"),
    [
        pytest.param(path, expected, name, id=f"{path.parent.name}-{name}")
        for path, answers in WRONG.items()
        for expected, name in answers
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(
    path: Path, expected: str, name: str, tmp_path: Path, capsys: Capture
) -> None:
    puzzle, answer = puzzle_of(path.parent.name), tmp_path / f"{name}.py"
    answer.write_text(f"{path.read_text(encoding='utf-8')}\n\n{puzzle.function} = {name}\n", encoding="utf-8")
    patience = 5.0 if "waited in vain" in expected else puzzles.PATIENCE  # which is for readers
    assert puzzles.check(puzzle, answer, patience) == 1
    printed = capsys.readouterr().out
    said = " ".join(printed.split())
    assert said.startswith("Not yet: ")
    assert all(part in said for part in expected.split(" ..."))
    assert str(tmp_path) not in said
    assert max(map(len, printed.splitlines())) <= puzzles.LINE


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_puzzle_has_hints_documentation_and_two_wrong_answers(chapter: str) -> None:
    puzzle = puzzle_of(chapter)
    assert len(puzzle.hints) >= 2
    assert all(hint.endswith((".", "?", "!", "`")) for hint in puzzle.hints)
    assert sum(len(answers) for path, answers in WRONG.items() if path.parent.name == chapter) >= 2
    solution = getattr(importlib.import_module(f"muonbook.{chapter}.puzzle"), puzzle.function)
    assert solution.__doc__, "the solution is shown in the chapter"


def test_every_wrong_answer_belongs_to_a_puzzle() -> None:
    assert {path.parent.name for path in WRONG} <= set(CHAPTERS)
    assert all(path.read_text(encoding="utf-8").count("# expect: ") == len(found) for path, found in WRONG.items())


def test_puzzles_are_ready_without_torch() -> None:
    loads = "; ".join(f"import muonbook.{chapter}.puzzle" for chapter in CHAPTERS)
    ending = worlds.finish("-c", f"import sys; {loads}; sys.exit('torch' in sys.modules)")
    assert ending == (0, "", "")


# ---- Before any rank is started ---------------------------------------------------------------------------


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's file, beside the notebook."""
    monkeypatch.chdir(tmp_path)
    return Path("my_99.py")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def answer(rank) return 1\n", "Python cannot read my_99.py, line 1: expected ':'."),
        ("x = 1\n\ndef answer(rank):\nreturn 1\n", "Python cannot read my_99.py, line 4: expected an indented block"),
        ("return 1\n", "Python cannot read my_99.py, line 1: 'return' outside function."),
        ("", "my_99.py defines no answer."),
        ("def anwser(rank):\n    return 1\n", "my_99.py defines no answer. Is anwser what you meant by it?"),
        (
            'def answer(rank):\n    """Answer."""\n    raise NotImplementedError\n',
            "answer is not written yet: it still raises NotImplementedError (my_99.py, line 3).",
        ),
        (
            'def answer(rank):\n    raise NotImplementedError("your turn")\n',
            "answer is not written yet: it still raises NotImplementedError (my_99.py, line 2).",
        ),
    ],
)
def test_what_can_be_seen_in_the_file_is_said_before_a_rank_is_started(
    text: str, says: str, answer: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run", lambda *_: pytest.fail("a world was started"))
    answer.write_text(text)
    assert puzzles.check(workers.puzzle(workers.call, 4), answer) == 1
    said = said_by(capsys)
    assert said.startswith(f"Not yet: {says}")
    assert said.endswith(" Stuck? Add --hint 1 for the first of 2 hints.")


def test_a_missing_or_unreadable_file_is_a_wrong_argument(answer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run", lambda *_: pytest.fail("a world was started"))
    with pytest.raises(launch.UsageError, match=r"^--check my_99.py: there is no such file; run the cell that begins"):
        puzzles.check(ring_all_reduce.PUZZLE, answer)
    answer.mkdir()
    with pytest.raises(launch.UsageError, match="there is no such file"):
        puzzles.check(ring_all_reduce.PUZZLE, answer)
    answer.rmdir()
    answer.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(launch.UsageError, match="not a Python file in UTF-8"):
        puzzles.check(ring_all_reduce.PUZZLE, answer)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(launch.UsageError, match="run it without torchrun"):
        puzzles.check(ring_all_reduce.PUZZLE, answer)


# ---- In a world -------------------------------------------------------------------------------------------

EVERY = "def answer(rank):\n    if rank == {rank}:\n        {then}\n    return 'right'\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            EVERY.format(rank=1, then="raise NotImplementedError"),
            "rank 1: answer is not written yet: it still raises NotImplementedError (my_99.py, line 3).",
        ),
        (EVERY.format(rank=2, then="return [][7]"), "rank 2: IndexError: list index out of range (my_99.py, line 3)."),
        (EVERY.format(rank=0, then="exit(0)"), "rank 0: it called exit() (my_99.py, line 3)."),
        (EVERY.format(rank=2, then="import os; os._exit(3)"), "rank 2 left with exit code 3 before it had finished"),
        (
            "from nowhere import answer\n",
            "every rank: ModuleNotFoundError: No module named 'nowhere' (my_99.py, line 1).",
        ),
        ("answer = 'right'\n", "every rank: my_99.py defines no answer."),
        ("def answer(rank):\n    return rank\n", "rank 0 says 0. rank 1 says 1. Stuck?"),
    ],
    ids=["unwritten", "exception", "exit", "gone", "import", "no function", "judged"],
)
def test_what_goes_wrong_on_a_rank_is_named_while_the_others_wait(
    text: str, says: str, answer: Path, capsys: Capture
) -> None:
    answer.write_text(text)  # were the others' waiting waited for, this would take for ever
    assert puzzles.check(workers.puzzle(workers.call_and_meet, 3), answer, patience=1e6) == 1
    assert f"Not yet: {says}" in said_by(capsys)
    worlds.assert_worlds_left_nothing()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            EVERY.format(rank=1, then="while True: pass"),
            "stopped after 2 s: ranks 0 and 2 waited in vain for the others after your function; "
            "rank 1 was still computing in my_99.py, line 3. All ranks must make the same calls.",
        ),
        (
            "import torch.distributed as dist\n\ndef answer(rank):\n    if rank:\n        dist.barrier()\n",
            "stopped after 2 s: ranks 1 and 2 waited in vain for the others in my_99.py, line 5; "
            "rank 0 waited in vain for the others after your function. All ranks must make the same calls.",
        ),
        (
            "def answer(rank):\n    while True: pass\n",
            "stopped after 2 s: every rank was still computing in my_99.py, line 2.",
        ),
    ],
    ids=["one loops", "one is absent", "all loop"],
)
def test_an_answer_that_hangs_is_stopped_and_says_who_waited_where(
    text: str, says: str, answer: Path, capsys: Capture
) -> None:
    answer.write_text(text.replace("dist.barrier()", "dist.recv(__import__('torch').ones(1), 0)"))
    assert puzzles.check(workers.puzzle(workers.call_and_meet, 3), answer, patience=2) == 1
    assert f"Not yet: {says} Stuck?" in said_by(capsys)
    worlds.assert_worlds_left_nothing()


def test_messages_that_do_not_fit_are_explained_without_the_words_of_gloo(answer: Path, capfd: Capture) -> None:
    answer.write_text(
        "import torch\nimport torch.distributed as dist\n\n\n"
        "def answer(rank):\n    dist.all_reduce(torch.ones(3 + 1000 * rank))\n    return 'right'\n"
    )
    assert puzzles.check(workers.puzzle(workers.call, 3), answer) == 1
    said, errors = capfd.readouterr()
    assert re.search(
        r"Not yet: rank \d was killed by SIGABRT .* It was in my_99.py, line 6: do all ranks hand over",
        " ".join(said.split()),
    )
    assert errors == ""


def test_what_the_function_prints_is_shown_in_rank_order(answer: Path, capsys: Capture) -> None:
    answer.write_text(
        "def answer(rank):\n    print('I am', rank)\n"
        "    for line in range(20 * (rank == 1)):\n        print(line)\n    return 'right'\n"
    )
    assert puzzles.check(workers.puzzle(workers.call, 2), answer) == 0
    many = [f"rank 1: {line}" for line in range(11)]
    assert capsys.readouterr().out.splitlines() == [
        *("Solved: 2 right.", "Your function printed:", "rank 0: I am 0", "rank 1: I am 1"),
        *(*many, "rank 1: ... and 9 lines more"),
    ]


def test_a_world_of_one_names_no_rank_and_leaves_this_process_alone(answer: Path, capsys: Capture) -> None:
    puzzle = workers.puzzle(workers.call, 1)
    answer.write_text("def answer(rank):\n    while True: pass\n")
    assert puzzles.check(puzzle, answer, patience=1) == 1
    assert "Not yet: stopped after 1 s: your function was still computing in my_99.py, line 2. " in said_by(capsys)
    answer.write_text("def answer(rank):\n    return {}['x']\n")
    assert puzzles.check(puzzle, answer) == 1
    assert "Not yet: KeyError: 'x' (my_99.py, line 2).\n" in capsys.readouterr().out
    assert "answer" not in sys.modules
    assert [path.name for path in answer.resolve().parent.iterdir()] == ["my_99.py"]


def test_addresses_and_folders_stay_out_of_complaints(answer: Path, capsys: Capture) -> None:
    answer.write_text("import os\ndef answer(rank):\n    raise ValueError(f'{object()} in {os.getcwd()}/here')\n")
    puzzles.check(workers.puzzle(workers.call, 1), answer)
    said = capsys.readouterr().out.splitlines()[0]
    assert said == "Not yet: ValueError: <object object at 0x...> in here (my_99.py, line 3)."


def test_going_around_the_ledger_is_noticed(answer: Path, capsys: Capture) -> None:
    answer.write_text("def total(group, x):\n    return group.all_reduce(x, 'sum')\n")
    assert puzzles.check(workers.ledger_puzzle(), answer) == 0
    assert capsys.readouterr().out == "Solved: recorded.\n"
    answer.write_text("import torch.distributed as dist\ndef total(group, x):\n    dist.all_reduce(x)\n    return x\n")
    assert puzzles.check(workers.ledger_puzzle(), answer) == 1
    assert "every rank: torch saw 1 all_reduce over world, the ledger 0: use the collectives" in said_by(capsys)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "the sum is nothing: is there a `return`?"),
        ([1.0], "the sum is a list, not a tensor."),
        (7, "the sum is an int, not a tensor."),
        (torch.ones(4), "the sum has shape (4,), and (2, 2) is wanted."),
        (torch.ones(2, 2, dtype=torch.float64), "the sum is float64, and float32 is wanted."),
        (torch.ones(2, 2), ""),
    ],
)
def test_a_tensor_that_is_not_as_expected_is_described(found: object, says: str) -> None:
    expected = pytest.raises(puzzles.Unsolved, match=f"^{re.escape(says)}$") if says else nullcontext()
    with expected:
        puzzles.require_tensor("the sum", found, [2, 2], torch.float32)


# ---- The ring and the command line ------------------------------------------------------------------------


def test_the_ring_refuses_what_is_not_a_vector_of_float32() -> None:
    ring = ring_all_reduce.Ring(0, 4)
    for chunk, says in (([1.0], "not a list"), (torch.ones(2, 2), r"shape \(2, 2\)"), (torch.arange(3), "torch.int64")):
        with pytest.raises(puzzles.Unsolved, match=says):
            ring.pass_on(chunk)  # type: ignore[arg-type]
    assert (ring.calls, ring.elements) == (0, 0)


@pytest.mark.parametrize(("length", "elements"), [(8, 12), (10, 18), (3, 6), (12, 18)])
def test_the_rings_budget_is_that_of_the_ring_formula(length: int, elements: int) -> None:
    from distmuon.sharding.ledger import ring_bytes

    assert ring_all_reduce.budget(length, 4) == elements == ring_bytes("all_reduce", 4 * length, 4) / 4 or length % 4


def parse(*given: str) -> argparse.Namespace:
    parser = launch.parser(None)
    puzzles.add_arguments(parser)
    return parser.parse_args(given)


def test_a_worker_without_either_flag_does_its_own_work(capsys: Capture) -> None:
    assert puzzles.handle(parse(), ring_all_reduce.PUZZLE) is None
    assert capsys.readouterr().out == ""


def test_hints_are_counted_from_one(answer: Path, capsys: Capture) -> None:
    hints = ring_all_reduce.PUZZLE.hints
    assert puzzles.handle(parse("--hint", "2"), ring_all_reduce.PUZZLE) == 0
    assert capsys.readouterr().out == f"Hint 1 of 3: {hints[0]}\nHint 2 of 3: {hints[1]}\n"
    answer.write_text("def other(): ...\n")
    assert puzzles.handle(parse("--hint", "99", "--check", str(answer)), ring_all_reduce.PUZZLE) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"Hint 3 of 3: {hints[2]}"
    with pytest.raises(launch.UsageError, match="hints are counted from 1 to 3"):
        puzzles.handle(parse("--hint", "0"), ring_all_reduce.PUZZLE)


def test_a_worker_with_a_puzzle_exits_as_the_check_does(tmp_path: Path) -> None:
    worker = tmp_path / "99_ring.py"
    worker.write_text(
        f"import sys\nsys.path.insert(0, {str(worlds.ROOT / 'scripts')!r})\n"
        "from distmuon import launch\nfrom muonbook import puzzles\n"
        "from muonbook.ch05.puzzle import PUZZLE\n"
        "def main():\n    parser = launch.parser(None)\n    puzzles.add_arguments(parser)\n"
        "    return puzzles.handle(parser.parse_args(), PUZZLE)\n"
        "if __name__ == '__main__':\n    launch.command(main)\n"
    )
    (tmp_path / "right.py").write_text("from muonbook.ch05.puzzle import all_reduce\n")
    for file, code, said in (("none.py", 2, "error: --check"), ("right.py", 0, "Solved: the exact sum on all 4 ranks")):
        done = subprocess.run(
            [sys.executable, str(worker), "--check", file], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == code
        assert (done.stdout + done.stderr).startswith(said)
