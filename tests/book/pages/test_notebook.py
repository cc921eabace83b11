"""What every chapter leans on: a start that can be repeated, `!` that fails aloud, source as it stands, pictures."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from matplotlib.figure import Figure

from distmuon.sharding import layout
from muonbook import notebook
from muonbook.measure import results


class Shell:
    """As much of IPython's shell as `notebook` touches."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {"number": 7}

    def system(self, command: str) -> None:
        raise AssertionError("IPython's own `!` was used")

    def var_expand(self, command: str, depth: int = 0) -> str:
        return command.replace("{number}", str(self.user_ns["number"]))


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    made = Shell()
    monkeypatch.setattr(notebook, "get_ipython", lambda: made)
    return made


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    what: list[Any] = []
    monkeypatch.setattr(notebook, "display", lambda thing, **_: what.append(thing))
    return what


def test_start_can_be_repeated_and_puts_this_python_first(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", "/usr/bin")
    notebook.start("00_one_page")
    notebook.start("00_one_page")
    assert os.environ["PATH"] == f"{beside}{os.pathsep}/usr/bin"
    assert shell.system is notebook.run_command  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("other", [None, "/bin/sh"], ids=["no python beside it", "another one beside it"])
def test_python_is_this_kernels_where_it_is_called_python3(
    other: str | None, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (home := tmp_path / "a folder").mkdir()
    (home / "python3").symlink_to(sys.executable)
    if other is not None:
        (home / "python").symlink_to(other)
    monkeypatch.setattr(sys, "executable", str(home / "python3"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    notebook.start("00_one_page")
    notebook.start("00_one_page")
    assert os.environ["PATH"].count(os.pathsep) == 2
    notebook.run_command("""python -c 'import sys; print(sys.executable, sys.argv[1:])' "two words" """)
    assert capfd.readouterr().out.splitlines()[2:] == [f"{home}/python3 ['two words']"]


def test_start_outside_a_notebook_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "get_ipython", lambda: None)
    monkeypatch.setenv("PATH", "/usr/bin")
    notebook.start("00_one_page")
    with pytest.raises(RuntimeError, match="stands for `!` in a notebook"):
        notebook.run_command("true")


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (None, ""),
        (59.9, "; this chapter's runs take less than a minute"),
        (60.0, "; this chapter's runs take about 1 minute"),
        (140.0, "; this chapter's runs take about 2 minutes"),
    ],
)
def test_start_says_what_is_here_and_how_long_it_took_where_that_was_measured(
    seconds: float | None, says: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    taken = {"05_x": 1000.0} | ({"07_x": seconds} if seconds else {})
    (tmp_path / f"{notebook.TAKEN}.json").write_text(json.dumps({"seconds": taken}))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin")
    notebook.start("07_x")
    assert capsys.readouterr().out == f"Ready: torch 2.13.0, 1 core{says}.\n"


@pytest.mark.parametrize(
    ("version", "old"), [("2.10.1", True), ("1.13.0", True), ("2.11.0+cpu", False), ("3.0", False)]
)
def test_a_torch_that_is_too_old_is_named(
    version: str, old: bool, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(torch, "__version__", version)
    if old:
        with pytest.raises(RuntimeError, match=f"torch is {version}, and this book needs 2.11 or newer"):
            notebook.start("00_one_page")
    else:
        notebook.start("00_one_page")


def test_a_command_prints_both_streams_in_order_without_a_terminal(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "import sys; print(sys.stdout.isatty()); print({number}, file=sys.stderr); print('Newton–Schulz', end='')"
    notebook.run_command(f'{sys.executable} -c "{program}"')
    assert capfd.readouterr() == ("False\n7\nNewton–Schulz", "")
    assert shell.user_ns["_exit_code"] == 0


def test_a_command_that_fails_raises_after_it_has_printed(shell: Shell, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(notebook.WorkerFailed, match="ended with exit code 3"):
        notebook.run_command("echo before; exit 3")
    assert capfd.readouterr().out == "before\n"
    assert shell.user_ns["_exit_code"] == 3
    notebook.run_command("(exit 1) || true")
    assert shell.user_ns["_exit_code"] == 0


def test_interrupting_the_cell_interrupts_the_command(
    shell: Shell, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupt() -> None:
        worlds.eventually((tmp_path / "up").exists, worlds.PATIENCE)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()  # `--quick` skips what it waits for
    with pytest.raises(KeyboardInterrupt):
        notebook.run_command(f"echo up; touch {tmp_path}/up; sleep 30; echo never")
    assert capfd.readouterr().out == "up\n"


def test_source_is_shown_as_it_stands_in_its_file(shown: list[Any]) -> None:
    notebook.source(layout.Range.intersect)
    text = shown[0].data
    assert text.startswith("From `scripts/distmuon/sharding/layout.py`:\n\n```python\ndef intersect(")
    assert text.endswith("\n```")
    body = text.split("```python\n")[1].removesuffix("\n```")
    for line in body.splitlines():
        assert line in Path(layout.__file__).read_text(encoding="utf-8")


def test_source_shows_several_and_folds(shown: list[Any]) -> None:
    notebook.source(notebook.start, notebook.source, fold="Both")
    text = shown[0].data
    assert text.startswith("<details><summary>Both</summary>\n\nFrom `scripts/muonbook/notebook.py`:")
    assert text.count("```python\n") == 2
    assert text.endswith("\n\n</details>")


def test_a_picture_comes_with_its_description(shown: list[Any]) -> None:
    figure = Figure(figsize=(1, 1))
    notebook.picture(figure, "A blank square, one inch wide, that stands for every figure.")
    assert shown[0]["image/png"].startswith(b"\x89PNG")
    assert shown[0]["text/plain"] == "A blank square, one inch wide, that stands for every figure."
