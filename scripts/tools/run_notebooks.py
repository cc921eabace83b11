"""Run the chapters and store what they print and draw: `make notebooks`.

Every chapter runs in a fresh kernel, in an empty folder beside copies of scripts/ and book/: nothing that it writes
lands in the tree, and nothing that is not committed can help it. The file is rewritten only when every cell has run,
and on one machine always to the same bytes: no times, no counts but 1..n, and no versions but the one of torch, which
the first cell prints.

python scripts/tools run_notebooks
python scripts/tools run_notebooks 07 12
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from distmuon import launch
from tools import set_address

ROOT = Path(__file__).resolve().parents[2]
CELL_SECONDS = 180  # for one cell; a chapter whose cell takes longer is too slow to read along
VARIES = "nbval-ignore-output"  # the tag of a cell whose output differs from run to run: timings, last digits
BESIDE = ("scripts", "book")  # what a chapter finds next to its folder
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},  # the book colours `!python` by the latter
}
CELL_METADATA = {"tags"}  # what a chapter's author writes; editors and Colab leave more behind
# What a cell tagged `hide-input` gets besides, so that it is folded in Colab (which shows `# @title` above it) and in
# Jupyter as well; the book shows the comment that it begins with.
FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}}

# The first code cell of every chapter, which `first_cell` fills in and `regenerate` keeps alike. The folder's name is
# given, because the repository may be called otherwise one day. While the placeholder stands there, nothing is fetched.
# Git writes its index last, so a clone without one was broken off.
FIRST_CELL = """\
# @title Run this first: it fetches the project where it is missing, and installs nothing
import os, subprocess, sys

address, branch, copy = "{url}", "{branch}", "muon-at-scale"
places = [place for place in ("..", ".", copy) if os.path.exists(place + "/scripts/distmuon")]
if not places and not os.path.exists(copy):
    if "/{placeholder}/" in address:
        remedy = "open this notebook in the folder notebooks of a copy that you have"
        sys.exit("This project is not published yet, so nothing is fetched; " + remedy + ".")
    command = ["git", "clone", "--quiet", "--depth=1", "--branch=" + branch, address, copy]
    quiet = dict(os.environ, GIT_TERMINAL_PROMPT="0")  # it would wait for a password
    try:
        subprocess.run(command, check=True, env=quiet, stderr=subprocess.PIPE, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).splitlines()[0].rstrip(".")
        sys.exit("The project could not be fetched (" + reason + "); mend that, and try again.")
    places = [copy]
home = places[0] if places else copy
if not places or (os.path.isdir(home + "/.git") and not os.path.exists(home + "/.git/index")):
    problem = "In " + os.path.abspath(home) + " there is an unfinished copy of the project"
    sys.exit(problem + "; remove that folder, and run this cell again.")
if home != "..":
    os.chdir(home + "/notebooks")
sys.path.insert(0, os.path.abspath("../scripts"))
from muonbook import notebook

notebook.start("{chapter}")"""
STARTS = re.compile(r"\bnotebook\.start\([^()]*\)\s*\Z")  # how the first cell ends, of today and of earlier days


def first_cell(url: str, name: str, branch: str = set_address.BRANCH) -> str:
    """Return the source of a chapter's first code cell.

    url: of the repository. name: of the notebook's file, without the ending. branch: of the repository, to be fetched.
    """
    return FIRST_CELL.format(url=url, branch=branch, placeholder=set_address.PLACEHOLDER, chapter=name)


class ChapterFailed(RuntimeError):
    """A cell of a chapter failed; the message names both."""


def chapters(folder: Path, names: list[str]) -> list[Path]:
    """Return the chapters in `folder`, or those that `names` begin: 07, 07_virtual_map. Raises UsageError."""
    found = sorted(folder.glob("[0-9][0-9]*_*.ipynb"))
    unknown = [name for name in names if not any(path.stem.startswith(Path(name).stem) for path in found)]
    if unknown:
        raise launch.UsageError(
            f"there is no chapter {unknown[0]}; there are {', '.join(path.stem for path in found) or 'none'}."
        )
    return [path for path in found if not names or any(path.stem.startswith(Path(name).stem) for name in names)]


def regenerate_all(paths: list[Path]) -> Iterator[str]:
    """Regenerate chapters, and yield the line about each: most side by side, one per core; what times something, last.

    A chapter times something if the output of one of its cells differs from run to run; it has the machine to itself.
    Raises ChapterFailed for the first that fails, and begins no other.
    """
    alone = [path for path in paths if VARIES in path.read_text(encoding="utf-8")]
    others = [path for path in paths if path not in alone]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            yield from pool.map(regenerate, others)
        except ChapterFailed:
            pool.shutdown(cancel_futures=True)
            raise
    yield from map(regenerate, alone)


def regenerate(path: Path, root: Path = ROOT) -> str:
    """Run one chapter and rewrite its file; return a line of numbers about it.

    root: the tree whose scripts/ and book/ it uses. Raises ChapterFailed, and leaves the file as it was.
    """
    started = time.monotonic()
    chapter = nbformat.read(path, as_version=4)
    share_first_cell(chapter, path.stem, set_address.current(root).url)
    execute(chapter, path.stem, root)
    normalize(chapter)
    replace(path, nbformat.writes(chapter, version=4) + "\n")
    code = [cell for cell in chapter.cells if cell.cell_type == "code"]
    runs = sum(len(re.findall(r"^\s*!\s*python\b", cell.source, re.MULTILINE)) for cell in code)
    drawn = sum(
        bool({"image/png", "text/html"} & set(output.get("data", {}))) for cell in code for output in cell.outputs
    )
    seconds = time.monotonic() - started
    return f"{path.stem}: {seconds:.0f} s, {len(code)} code cells, {runs} runs of workers, {drawn} figures"


def share_first_cell(chapter: NotebookNode, name: str, url: str, branch: str = set_address.BRANCH) -> None:
    """Write the shared first cell into `chapter`, over the one that starts it now. Arguments as of `first_cell`."""
    first = next((cell for cell in chapter.cells if cell.cell_type == "code"), None)
    if first is not None and STARTS.search(first.source):
        first.source = first_cell(url, name, branch)
        first.metadata["tags"] = ["hide-input"]  # the same in every chapter: the book folds it


def execute(chapter: NotebookNode, name: str, root: Path) -> None:
    """Fill in the outputs of `chapter` from a fresh kernel. Raises ChapterFailed."""
    with tempfile.TemporaryDirectory(prefix="chapter-") as directory:
        folder = Path(directory) / "notebooks"
        folder.mkdir()
        for beside in BESIDE:
            if (root / beside).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
                shutil.copytree(root / beside, Path(directory) / beside, ignore=ignored)
        client = NotebookClient(
            chapter,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            coalesce_streams=True,
            record_timing=False,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns that its sockets are not encrypted
        )
        try:
            client.execute(env=kernel_environment(Path(directory)))
        except CellExecutionError as error:
            raise ChapterFailed(f"{name}: {_plain(str(error))}") from error
        except CellTimeoutError as error:
            raise ChapterFailed(f"{name}: a cell took longer than {CELL_SECONDS} s.\n{_plain(str(error))}") from error
        except DeadKernelError as error:
            raise ChapterFailed(f"{name}: the kernel died. {error}") from error


def kernel_environment(directory: Path) -> dict[str, str]:
    """Return the environment of a kernel: this interpreter is `python`, and nobody's IPython settings are read."""
    kept = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONSTARTUP"}}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PATH": path, "IPYTHONDIR": str(directory / "ipython"), "PYTHONDONTWRITEBYTECODE": "1"}


def normalize(chapter: NotebookNode) -> None:
    """Leave in `chapter` only what its author wrote and what its cells produced."""
    chapter.nbformat, chapter.nbformat_minor = 4, 5
    chapter.metadata = nbformat.from_dict(METADATA)
    seen: dict[str, int] = {}
    count, here = 0, set_address.current(ROOT)
    for cell in chapter.cells:
        # out of the source: a chapter that is written anew keeps them, and so do the cells around one that is inserted;
        # and out of the source as it is without an address, so that `make address` leaves them as well
        source, _ = set_address.rewrite(cell.source, here, set_address.NOWHERE)
        name = hashlib.sha256(f"{cell.cell_type}:{source}".encode()).hexdigest()[:8]
        seen[name] = seen.get(name, 0) + 1
        cell["id"] = name if seen[name] == 1 else f"{name}-{seen[name]}"
        kept = {key: value for key, value in cell.metadata.items() if key in CELL_METADATA}
        folded = FOLDED if "hide-input" in kept.get("tags", []) else {}
        cell.metadata = nbformat.from_dict({**folded, **kept})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            if output.output_type == "stream":
                output.text = without_carriage_returns(output.text)


def without_carriage_returns(text: str) -> str:
    """Return what a terminal would show in the end: a carriage return begins its line anew."""
    return "\n".join(line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n"))


def replace(path: Path, text: str) -> None:
    """Write a file in one move, so that nobody ever finds half of it."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        shutil.copymode(path, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip()


def main() -> int:
    """Run what the command line names; return 0, or 1 where a chapter failed."""
    parser = launch.parser(__doc__)
    parser.add_argument("names", nargs="*", help="chapters, by how their names begin: 07 (default: all)")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks", help="where they lie (default: notebooks)")
    arguments = parser.parse_args()
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's python3 kernel, not one of the user's
    try:
        for line in regenerate_all(chapters(arguments.folder, arguments.names)):
            print(line, flush=True)
    except ChapterFailed as error:
        print(f"error: {error}\nThe file was left as it was.", file=sys.stderr)
        return 1
    return 0
