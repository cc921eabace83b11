"""Run the chapters on what Colab ships, and compare what they print with what is stored: `make colab`.

Colab cannot be had on a machine of one's own; this is as near as pip allows. Every chapter runs alone in an empty
folder, in an environment that holds Colab's versions (.ci/colab.txt) and nothing of ours, where `google.colab` can be
imported and git finds the project: this working tree, as it stands. The kernel is Colab's; what starts it and compares
every output with the stored one, as `make test` does, is .venv's.

python scripts/tools run_in_colab --python .venv-colab/bin/python
python scripts/tools run_in_colab --python .venv-colab/bin/python 07 12
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from distmuon import launch
from muonbook import jobs
from tools import run_notebooks, set_address

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "file:///nowhere/"  # a fetch from here fails at once
READERS = set_address.Repository("a-reader", "muon-at-scale")  # what copies name: nothing is fetched from a placeholder
SHOWN = ("torch", "numpy", "matplotlib", "IPython", "ipykernel")  # versions, in the report's first line
# What nbval does not compare, as it wants to be told: lines about the machine, and what another version draws.
ELSEWHERE = "".join(f"regex: (?m)^{says}.*$\nreplace: {says}...\n" for says in (jobs.HERE, jobs.READY))
UNDRAWN = "regex: (?s)<svg .*?</svg>\nreplace: a picture\n"
STRANGE = ("GIT_", "JUPYTER_", "PYTEST_", "PYTHON", "JPY_", "COV_", "IPYTHON")  # ours, and not a reader's


def code_cells(path: Path) -> list[NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


# ---- A repository to fetch --------------------------------------------------------------------------------


def project_files(root: Path = ROOT) -> list[Path]:
    """Return every file of the working tree, relative to it, that .gitignore does not name. Raises UsageError.

    Git is asked with an empty history, so that an archive, which has none, is answered like a clone.
    """
    with tempfile.TemporaryDirectory(prefix="empty-") as empty:
        _git("init", "--quiet", "--bare", empty, folder=root)
        place = {"GIT_DIR": empty, "GIT_WORK_TREE": str(root)}
        listed = _git("ls-files", "-z", "--others", "--exclude-standard", folder=root, **place)
    return [Path(name) for name in filter(None, listed.split("\0")) if (root / name).is_file()]


def copy_tree(folder: Path, root: Path = ROOT) -> Path:
    """Copy the working tree as it stands, committed or not. Raises UsageError."""
    for name in project_files(root):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((root / name).read_bytes())
    (folder / "notebooks").mkdir(exist_ok=True)
    (folder / "notebooks" / ".keep").touch()
    return folder


def publish(folder: Path, root: Path = ROOT) -> Path:
    """Return a bare repository, inside `folder`, whose only commit is the working tree, published as `READERS`.

    Raises UsageError.
    """
    tree = folder / "tree"
    tree.mkdir()
    copy_tree(tree, root)
    set_address.set_address(tree, READERS.url)
    _git("init", "--quiet", "--initial-branch=main", ".", folder=tree)
    _git("add", "--all", ".", folder=tree)
    _git("commit", "--quiet", "--message=The tree as it stands", folder=tree)
    _git("clone", "--quiet", "--bare", str(tree), str(published := folder / "published.git"), folder=folder)
    _git("repack", "-adq", "--window=0", folder=published)  # once: else every clone, one per chapter, does it anew
    return published


def _git(*arguments: str, folder: Path, **place: str) -> str:
    """Return what git says in `folder`, without anybody's settings. place: variables that git reads."""
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    author = ["-c", "user.name=reader", "-c", "user.email=reader@example.org"]
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, env=os.environ | alone | place, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise launch.UsageError(
            f"`git {arguments[0]}` failed in {folder}, and chapters are fetched with git: {done.stderr.strip()}"
        )
    return done.stdout


# ---- A reader's machine -----------------------------------------------------------------------------------


def reader(folder: Path, source: str, colab: bool, python: str = sys.executable) -> dict[str, str]:
    """Return the environment of a reader whose git finds the project at `source`, and nothing else of ours.

    folder: for what the reader's machine holds beside the notebook. colab: whether `google.colab` can be imported.
    python: the interpreter of the kernel, and of the commands in cells.
    """
    packages = folder / "packages"
    (packages / "google" / "colab").mkdir(parents=True, exist_ok=True)
    (packages / "google" / "colab" / "__init__.py").touch()
    kernel = folder / "jupyter" / "kernels" / "reader" / "kernel.json"
    kernel.parent.mkdir(parents=True, exist_ok=True)
    command = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "A reader's", "language": "python"}))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(STRANGE)}
    return kept | {
        "HOME": str(folder),
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "JUPYTER_PATH": str(folder / "jupyter"),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{source}.insteadOf",
        "GIT_CONFIG_VALUE_0": READERS.url if source != NOWHERE else "https://",
        **({"PYTHONPATH": str(packages)} if colab else {}),
    }


def complaints(notebook: Path, home: Path, environment: dict[str, str], drawn_alike: bool = True) -> list[str]:
    """Run `notebook` where it lies and compare every output with the stored one; return what is not as it should be.

    home: the folder that `reader` made `environment` for, not the notebook's. drawn_alike: whether the same matplotlib
    draws; another puts the same words a hair beside, so pictures that move are then compared by their words. [] means:
    every code cell ran, was compared, and agreed.
    """
    (home / "pytest.ini").write_text("[pytest]\n")  # instead of any that lies in a folder above
    report = home / f"{notebook.stem}.xml"
    options = ["--nbval", "--nbval-kernel-name", "reader", "--nbval-cell-timeout", "1800", "-p", "nbval.plugin"]
    options += ["-p", "no:cacheprovider", "-c", str(home / "pytest.ini"), "--rootdir", str(notebook.parent)]
    (home / "sanitize.cfg").write_text(ELSEWHERE if drawn_alike else ELSEWHERE + UNDRAWN)
    options += ["--nbval-sanitize-with", str(home / "sanitize.cfg")]
    command = [sys.executable, "-m", "pytest", *options, "-q", f"--junit-xml={report}", notebook.name]
    done = subprocess.run(command, cwd=notebook.parent, env=environment, capture_output=True, text=True)
    if not report.exists():
        return [done.stdout + done.stderr]
    cases = list(ElementTree.parse(report).iter("testcase"))
    found = [
        re.sub(r"(\x1b|#x1B)\[[0-9;]*m", "", f"{case.get('name')}: {outcome.text or outcome.get('message')}").rstrip()
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


def in_colab(notebook: Path, published: str, folder: Path, python: str = sys.executable) -> list[str]:
    """Run `notebook` alone in an empty folder, where our scripts can only be fetched; return `complaints` of it.

    published: the address of a repository with the project. folder: an empty one, for the reader's machine.
    python: the interpreter whose packages are Colab's.
    """
    content, home = folder / "content", folder / "home"
    content.mkdir(parents=True)
    home.mkdir()
    text, _ = set_address.rewrite(notebook.read_text(encoding="utf-8"), set_address.current(ROOT), READERS)
    (content / notebook.name).write_text(text, encoding="utf-8")
    environment = reader(home, published, True, python)
    for module, there in (("distmuon", False), ("muonbook", False), ("google.colab", True)):
        tried = subprocess.run([python, "-c", f"import {module}"], cwd=content, env=environment, capture_output=True)
        if (tried.returncode == 0) != there:
            return [f"{module} can{'not' if there else ''} be imported before anything is fetched"]
    alike = versions(python)["matplotlib"] == version("matplotlib")
    found = complaints(content / notebook.name, home, environment, drawn_alike=alike)
    if not found and not (content / "muon-at-scale" / "scripts" / "distmuon").is_dir():
        found.append("nothing was fetched")
    return found


# ---- The report -------------------------------------------------------------------------------------------


def versions(python: str) -> dict[str, str]:
    """Return what stands behind the verdicts: Python's version and those of `SHOWN`, by name. Raises UsageError."""
    look = "import json, sys; from importlib.metadata import version\n"
    look += f"found = {{name: version(name) for name in {SHOWN!r}}}\n"
    look += "print(json.dumps({'Python': sys.version.split()[0], **found}))"
    try:
        done = subprocess.run([python, "-c", look], capture_output=True, text=True)
    except OSError as error:
        raise launch.UsageError(f"--python {python} cannot be started: {error.strerror}.") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise launch.UsageError(f"--python {python} lacks what Colab ships ({last}); `make colab` installs it.")
    return dict(json.loads(done.stdout))


def main() -> int:
    """Run what the command line names; return 0, or 1 where a chapter was not as stored."""
    parser = launch.parser(__doc__)
    parser.add_argument("names", nargs="*", help="chapters, by how their names begin: 07 (default: all)")
    parser.add_argument("--python", required=True, help="the interpreter whose packages are Colab's")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks", help="where they lie (default: notebooks)")
    arguments = parser.parse_args()
    python = os.path.abspath(arguments.python)  # not resolved: a link is how an environment knows its packages
    chosen = run_notebooks.chapters(arguments.folder, arguments.names)
    print(", ".join(f"{name} {found}" for name, found in versions(python).items()), flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="colab-") as directory:
        published = publish(Path(directory)).as_uri()
        for path in chosen:
            found = in_colab(path, published, Path(directory) / path.stem, python)
            failed += bool(found)
            differ = f"{len(found)} of {len(code_cells(path))} code cells are not as stored"
            print(f"{path.stem}: {differ if found else 'every cell ran and printed what is stored'}", flush=True)
            for complaint in found:
                print(f"\n{complaint}\n", file=sys.stderr, flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} chapters run there as they are stored.")
    return 1 if failed else 0
