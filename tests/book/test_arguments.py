"""The command lines of all workers: what cannot be, and what would do nothing, is one sentence, and nothing starts."""

import argparse
import functools
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import worlds

from distmuon import launch
from distmuon.launch import rank, supervise
from distmuon.launch.cli import Parser
from muonbook import network_emulation
from muonbook.ch04 import jobs as ch04_jobs
from muonbook.ch12 import byte_counts
from muonbook.ch15 import survey
from muonbook.ch18 import divisions
from muonbook.planner import plan_page
from tools import bench

PAGE = "00_one_page"  # imports nothing of ours, and so has a parser of its own; tested in ch00
PLAN = "plan"  # the number of a worker that belongs to no chapter
WORKERS = sorted(path for path in (worlds.ROOT / "scripts").glob("[0-9][0-9]*_*.py") if path.stem != PAGE)
WORKERS.append(worlds.ROOT / "scripts" / "plan.py")
JOBS = {  # where the name of a job is not how it is asked for
    ("04", "--recipe"): "--recipe original --task mnist",
    ("04", "--fetch"): "--fetch --task mnist",
    ("05", "--mistake"): "--mistake skip",
    ("14", "--traces"): "--traces out/x",
    ("17", "--train"): "--train 3",
    ("18", "--drill"): "--drill all",
    ("18", "--soak"): "--soak --json out/x.json",
    (PLAN, "--measure"): "--measure --json out/x.json",
}
PUZZLE = ("check", "hint")
HUGE = "99999999999999999999"


class Started(Exception):
    """A world, a download or a measurement would have begun."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise Started

    for module, name in (
        (supervise, "run_local"),
        (rank, "run_alone"),
        (ch04_jobs, "fetch"),
        (byte_counts, "compared_on"),
        (byte_counts, "ratios_on"),
        (survey, "survey"),
        (plan_page, "search"),
        (plan_page, "WorldPlan"),
        (plan_page, "compared"),
        (divisions, "survey"),
    ):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(network_emulation, "setup_bridge", lambda: None)
    monkeypatch.setattr(network_emulation, "is_bridge", lambda: True)
    monkeypatch.setattr(network_emulation, "why_unavailable", lambda: None)
    for name in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # worker 13 sets them: put back afterwards
    monkeypatch.chdir(tmp_path)


@functools.cache
def worker(number: str) -> ModuleType:
    """Return the worker's module, imported and not run."""
    (path,) = (path for path in WORKERS if number_of(path.name) == number)
    spec = importlib.util.spec_from_file_location(f"worker_{number}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def actions(number: str) -> dict[str, argparse.Action]:
    """Return the worker's options by name, without those of its puzzle."""
    found: list[Parser] = []

    def remember(self: Parser) -> None:
        found.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "parse_args", remember)
        worker(number).parse()
    return {a.dest: a for a in found[0]._actions if a.help not in (None, argparse.SUPPRESS) and a.dest != "help"}


def said(monkeypatch: pytest.MonkeyPatch, number: str, *given: str) -> str:
    """Return the sentence with which a worker refuses a command line, or "" where it goes on."""
    monkeypatch.setattr(sys, "argv", [f"{number}.py", *given])
    words = ""
    try:
        worker(number).main()
    except Started:
        pass
    except launch.UsageError as error:
        words = str(error)
    assert re.fullmatch(r"|.+(\.|--fetch)", words)
    return words


def asked(number: str, job: str) -> list[str]:
    return JOBS.get((number, job), job).split()


def given(number: str, name: str) -> list[str]:
    """Return the words that give an option on a command line."""
    return [f"--{name.replace('_', '-')}", *([] if actions(number)[name].nargs == 0 else ["1"])]


def jobs(number: str) -> dict[str, tuple[str, ...]]:
    """Return the worker's jobs with the options of each; one job takes them all where there is no table."""
    return getattr(worker(number), "TAKES", {"": tuple(name for name in actions(number) if name not in PUZZLE)})


def number_of(name: str) -> str:
    """Return how a worker of this file name is called here."""
    return PLAN if name == f"{PLAN}.py" else name.partition("_")[0]


NUMBERS = [number_of(path.name) for path in WORKERS]


@pytest.mark.parametrize("number", NUMBERS)
def test_an_option_that_does_nothing_is_refused_in_every_job(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    options, table = actions(number), jobs(number)
    chooses = {job[2:].partition(" ")[0].replace("-", "_") for job in table}
    assert set().union(*table.values(), chooses) >= set(options) - set(PUZZLE)
    for job, takes in table.items():
        for name in set(options) - {*PUZZLE, *chooses}:
            words = said(monkeypatch, number, *asked(number, job), *given(number, name))
            nothing = f"--{name} does nothing {f'with {job}' if job else 'by itself'}; ".replace("_", "-")
            assert words.startswith(nothing) == (name not in takes), (job, name, words)


@pytest.mark.parametrize("number", NUMBERS)
def test_no_option_may_be_abbreviated(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    for name in actions(number):
        option, *value = given(number, name)
        words = said(monkeypatch, number, option[:-1], *value)
        assert words.startswith(f"unrecognized arguments: {option[:-1]}"), words


@pytest.mark.parametrize("number", [number for number in NUMBERS if number.isdigit()])
def test_a_puzzle_takes_no_other_option(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    for name in set(actions(number)) - set(PUZZLE):
        for puzzle in (["--check", "mine.py"], ["--hint", "1"], ["--hint", "1", "--check", "mine.py"]):
            words = said(monkeypatch, number, *puzzle, *given(number, name))
            assert "does nothing with --" in words, (name, words)


@pytest.mark.parametrize(
    ("number", "line", "says"),
    [
        ("04", "--if-here", "--if-here --task digits: its data is always here; leave --if-here out."),
        ("05", "--mistake skip --show groups", "--show does nothing with --mistake; leave one of the two out."),
        ("06", "--json /proc/x", "--json does nothing by itself; it goes with --compare."),
        ("10", "--optimizer adamw --strategy owner", "--strategy does nothing with --optimizer adamw; leave one of"),
        (PLAN, "--quick", "--quick does nothing by itself; it goes with --measure."),
        (PLAN, "--compare --optimizer adamw", "--optimizer does nothing with --compare; leave one of the two out."),
        (PLAN, "--compare --ranks 64", "--compare needs a grid: give --tp with --ranks 64, or --dp."),
        (PLAN, "--measure --dp 4", "--dp does nothing with --measure; leave one of the two out."),
        (PLAN, "--optimizer adamw --strategy owner", "--strategy does nothing with --optimizer adamw; leave one of"),
        (PLAN, "--optimizer muonw --buckets flat", "--buckets does nothing with --optimizer muonw; leave one of"),
    ],
)
def test_what_does_nothing_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, number: str, line: str, says: str
) -> None:
    assert said(monkeypatch, number, *line.split()).startswith(says)


# ---- Numbers ----------------------------------------------------------------------------------------------

ZERO = {("10", "seed")}  # where 0 is a number like others


@pytest.mark.parametrize("number", NUMBERS)
def test_no_number_that_cannot_be_is_accepted(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    for name, action in actions(number).items():
        if action.type not in (int, float) or name in PUZZLE:
            continue
        for job, takes in jobs(number).items():
            if name in takes:
                for value in ("-1", "0", "nan", "inf", "-inf", "1e400", "many", "", HUGE):
                    words = said(monkeypatch, number, *asked(number, job), f"--{name.replace('_', '-')}={value}")
                    fine = value == "0" and (number, name) in ZERO
                    assert (words == "") == fine, (job, name, value, words)


@pytest.mark.parametrize(
    ("number", "line", "says"),
    [
        ("02", "--shape 99999999999x4", "--shape 99999999999x4: write rows x columns, each from 1 to 4096"),
        ("02", "--svd --threads 99999999999", "--threads 99999999999: a rank gets at most 1024; choose about one"),
        ("04", "--ranks 999", "--ranks 999: must be from 1 to 256."),
        ("05", "--dp 1000000", "--dp 1000000 --tp 1: one machine gets at most 256 ranks; choose fewer, or start them"),
        ("07", f"--dp {HUGE}", f"--dp {HUGE} --tp 1: one machine gets at most 256 ranks"),
        ("07", "--tp 3", "--tp 3: this chapter has DP ranks only; chapter 9 adds TP."),
        ("05", "--mistake skip --timeout nan", "--timeout nan: must be from 0.1 to 3,600."),
        ("13", f"--tp {HUGE}", f"--tp {HUGE} does not divide the model's 8 heads"),
    ],
)
def test_a_number_out_of_bounds_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, number: str, line: str, says: str
) -> None:
    assert said(monkeypatch, number, *line.split()).startswith(says)


# ---- What the book itself asks ----------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield (number, words) of every worker's command in chapters, pages, workers' help and `make bench`."""
    root, texts = worlds.ROOT, [path.read_text(encoding="utf-8") for path in WORKERS]
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    texts += [path.read_text(encoding="utf-8") for path in (root / "README.md", *(root / "book").glob("*.md"))]
    for text in texts:
        for number, line in re.findall(r"scripts/(\d\d|plan)(?:_\w+)?\.py((?: [^\n`|#\\;&]*)?)", text):
            if "[" not in line and "…" not in line and not PAGE.startswith(number):
                yield (
                    number,
                    shlex.split(
                        re.sub(r"\d?>\S*", "", line.replace("{dp}", "2").replace("{tp}", "2").replace("{D}", "4"))
                    ),
                )
    for name in bench.MEASUREMENTS:
        for quick in (False, True):
            script, *words = bench.command(name, quick)
            if "tools" not in script:
                yield number_of(Path(script).name), words


def test_no_command_of_the_book_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = list(dict.fromkeys((number, *words) for number, words in commands()))
    assert len(asked_for) > 60
    expected = "there is no such file|is not here|my_strategy.py|my_model.toml|sees no GPU"
    expected += "|expected at least one"  # a line that goes on
    for number, *words in asked_for:
        if "--help" not in words:
            answer = said(monkeypatch, number, *words)
            assert re.search(expected, answer) or not answer, (number, words, answer)
