"""`make colab`: the chapters run in the environment that it is given, and what is not as stored is named."""

from __future__ import annotations

import re
import site
import subprocess
import sys
import venv
from pathlib import Path

import chapters
import nbformat
import pytest
from chapters import ROOT

from tools import run_in_colab


def named(folder: Path, name: str, said: str) -> Path:
    """Write a notebook that names its environment, with `said` as the stored name."""
    code = "import os, sys; print(os.path.basename(sys.prefix))"
    stored = [nbformat.v4.new_output("stream", text=f"{said}\n")]
    cells = [chapters.ran_first_cell("00_tiny")]
    cells += [nbformat.v4.new_code_cell(code, execution_count=2, outputs=stored)]
    cells += [nbformat.v4.new_code_cell(f'!python -c "{code}"', execution_count=3, outputs=stored)]
    path = folder / f"{name}.ipynb"
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)), encoding="utf-8")
    return path


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """The packages of another environment, which has ours."""
    venv.create(tmp_path / "another", symlinks=True)
    (found,) = (tmp_path / "another").glob("lib/python*/site-packages")
    (found / "ours.pth").write_text("\n".join(site.getsitepackages()))
    return found


@pytest.fixture
def python(packages: Path) -> str:
    """The Python of that environment."""
    return str(packages.parents[2] / "bin" / "python")


def make_colab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "tools"), "run_in_colab", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_make_colab_runs_cells_and_their_commands_in_its_environment_and_names_what_is_not_as_stored(
    python: str, tmp_path: Path
) -> None:
    for name, said in (("00_right", "another"), ("01_wrong", "ours"), ("02_unasked", "")):
        named(tmp_path, name, said)
    done = make_colab("--python", python, "--folder", str(tmp_path), "00", "01")
    first, *rest = done.stdout.splitlines()
    assert re.fullmatch(
        r"Python 3\.\d+\.\d+, torch 2\.\S+, numpy \S+, matplotlib \S+, IPython \S+, ipykernel \S+", first
    )
    assert (done.returncode, rest) == (
        1,
        [
            "00_right: every cell ran and printed what is stored",
            "01_wrong: 2 of 3 code cells are not as stored",
            "1 of 2 chapters run there as they are stored.",
        ],
    )
    assert done.stderr.count("another") >= 2


def test_another_matplotlib_may_draw_beside_but_not_say_otherwise(
    python: str, packages: Path, published: str, tmp_path: Path
) -> None:
    cells = [chapters.ran_first_cell("00_tiny")]
    pictures = ("<svg x='1'>\na</svg><p>one</p>", "<svg x='2'>\na</svg><p>one</p>", "<svg x='1'>\na</svg><p>two</p>")
    for count, drawn in enumerate(pictures, 2):
        data = {"text/html": pictures[0], "text/plain": "words"}
        stored = [nbformat.v4.new_output("display_data", data)]
        source = f"display({data | {'text/html': drawn}!r}, raw=True)"
        cells.append(nbformat.v4.new_code_cell(source, execution_count=count, outputs=stored))
    path = tmp_path / "00_drawn.ipynb"
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)), encoding="utf-8")
    (packages / "matplotlib-1.0.dist-info").mkdir()
    (packages / "matplotlib-1.0.dist-info" / "METADATA").write_text("Name: matplotlib\nVersion: 1.0\n")
    found = run_in_colab.in_colab(path, published, tmp_path / "reader", python)
    assert ["<p>two" in complaint for complaint in found] == [True], found


def test_make_colab_refuses_an_interpreter_without_colabs_packages(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    for python, says in (
        (tmp_path / "bare" / "bin" / "python", "No package metadata was found for torch"),
        (tmp_path / "nowhere", "cannot be started: No such file or directory"),
    ):
        done = make_colab("--python", str(python))
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


def test_an_environment_that_holds_our_packages_is_not_colabs(python: str, packages: Path, tmp_path: Path) -> None:
    (packages / "scripts.pth").write_text(str(ROOT / "scripts"))
    found = run_in_colab.in_colab(named(tmp_path, "00_named", ""), run_in_colab.NOWHERE, tmp_path / "reader", python)
    assert found == ["distmuon can be imported before anything is fetched"]


@pytest.mark.parametrize("clone", ["none", "around it", "its own"])
def test_the_files_of_an_archive_are_those_of_a_clone(clone: str, tmp_path: Path) -> None:
    """Committed or not; not what .gitignore names, although somebody may have committed that; nor what was removed."""
    tree = tmp_path / "tree"
    for name in ("kept.py", "folder/kept too.md", "folder/new \N{SNOWMAN}.txt", "ignored.log", "out/ignored.json"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("")
    (tree / ".gitignore").write_text("*.log\n/out/\n")
    expected = {".gitignore", "kept.py", "folder/kept too.md", "folder/new \N{SNOWMAN}.txt"}
    if clone != "none":
        place = tmp_path if clone == "around it" else tree
        (tree / "removed.py").write_text("")
        for words in (["init", "-q"], ["add", "-f", "."], ["commit", "-qm", "all"]):
            author = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
            subprocess.run(["git", *author, *words], cwd=place, check=True)
        (tree / "removed.py").unlink()
        (tree / "folder" / "later.md").write_text("")
        expected |= {"folder/later.md"}
    assert {path.as_posix() for path in run_in_colab.project_files(tree)} == expected
    copied = run_in_colab.copy_tree(tmp_path / "copy", tree)
    assert {path.relative_to(copied).as_posix() for path in copied.rglob("*") if path.is_file()} == (
        expected | {"notebooks/.keep"}
    )
