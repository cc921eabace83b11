"""Notebooks for tests: the chapters, tiny ones, and a strict run of one as a reader would have it."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat

from tools import run_notebooks, set_address

ROOT = Path(__file__).resolve().parents[3]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HERE = set_address.current(ROOT)
FIRST_CELL = run_notebooks.FIRST_CELL.format(url=HERE.url)
NOWHERE = "file:///nowhere/"  # a fetch from here fails at once

PICTURE = """\
import numpy as np
from matplotlib.figure import Figure
from muonbook.figures import style

figure = Figure(figsize=(2, 1))
figure.subplots().plot(np.arange(4.0))
notebook.picture(figure, "A line that rises from 0 to 3, drawn to see that pictures are stored.")"""


def tiny_notebook(path: Path, *cells: str) -> Path:
    """Write a notebook with the shared first cell and these code cells, and run it as `make notebooks` does."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_markdown_cell("# Tiny"), *map(nbformat.v4.new_code_cell, (FIRST_CELL, *cells))]
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    run_notebooks.regenerate(path)
    return path


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


# ---- A repository to fetch --------------------------------------------------------------------------------


def git(*arguments: str, folder: Path) -> None:
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    author = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, env=os.environ | alone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def copy_tree(folder: Path) -> Path:
    """Copy the working tree as it stands: what git tracks or would track, committed or not."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "notebooks").mkdir(exist_ok=True)
    (folder / "notebooks" / ".keep").touch()
    return folder


def publish(folder: Path) -> Path:
    """Return a bare repository with the working tree as its only commit."""
    tree = folder / "tree"
    tree.mkdir()
    copy_tree(tree)
    git("init", "--quiet", "--initial-branch=main", ".", folder=tree)
    git("add", "--all", ".", folder=tree)
    git("commit", "--quiet", "--message=The tree as it stands", folder=tree)
    git("clone", "--quiet", "--bare", str(tree), str(folder / "published.git"), folder=folder)
    return folder / "published.git"


# ---- Running one strictly ---------------------------------------------------------------------------------


def reader(folder: Path, source: str, colab: bool) -> dict[str, str]:
    """Return the environment of a reader whose git finds the project at `source`, and nothing else of ours.

    folder: for what the reader's machine holds beside the notebook. colab: whether `google.colab` can be imported.
    """
    packages = folder / "packages"
    (packages / "google" / "colab").mkdir(parents=True, exist_ok=True)
    (packages / "google" / "colab" / "__init__.py").touch()
    strange = ("GIT_", "JUPYTER_", "PYTEST_", "PYTHON", "JPY_", "COV_", "IPYTHON")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(strange)}
    return kept | {
        "HOME": str(folder),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{source}.insteadOf",
        "GIT_CONFIG_VALUE_0": HERE.url if source != NOWHERE else "https://",
        **({"PYTHONPATH": str(packages)} if colab else {}),
    }


def complaints(notebook: Path, home: Path, environment: dict[str, str]) -> list[str]:
    """Run `notebook` where it lies and compare every output with the stored one; return what is not as it should be.

    home: a folder of the reader's that is not the notebook's. [] means: every code cell ran, was compared, and agreed.
    """
    (home / "pytest.ini").write_text("[pytest]\n")  # instead of any that lies in a folder above
    report = home / f"{notebook.stem}.xml"
    options = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout", "600", "-p", "nbval.plugin"]
    options += ["-p", "no:cacheprovider", "-c", str(home / "pytest.ini"), "--rootdir", str(notebook.parent)]
    command = [sys.executable, "-m", "pytest", *options, "-q", f"--junit-xml={report}", notebook.name]
    done = subprocess.run(command, cwd=notebook.parent, env=environment, capture_output=True, text=True)
    if not report.exists():
        return [done.stdout + done.stderr]
    cases = list(ElementTree.parse(report).iter("testcase"))
    found = [
        f"{case.get('name')}: {outcome.tag} {outcome.get('message', '')}\n{outcome.text or ''}"
        for case in cases
        for outcome in case
        if outcome.tag in ("failure", "error", "skipped")  # an expected failure is reported as skipped
    ]
    cells = code_cells(notebook)
    compared = [cell for cell in cells if cell.execution_count is not None]
    if not len(cases) == len(cells) == len(compared) > 0:
        found.append(f"{len(cells)} code cells, {len(compared)} with stored outputs, {len(cases)} reported")
    if done.returncode != 0 and not found:
        found.append(done.stdout + done.stderr)
    return found
