"""What every chapter does in the same way: start, run a worker, show the source that runs, show pictures, fold.

A notebook calls `start()` in its first cell. Nothing here is needed outside notebooks, and only notebooks import it.
"""

from __future__ import annotations

import inspect
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import Markdown, display
from matplotlib.figure import Figure
from PIL import Image

from distmuon.launch import session
from muonbook import jobs
from muonbook.figures import player, style
from muonbook.measure import results

TORCH_FLOOR = (2, 11)  # what Colab ships; a floor, never a pin: replacing Colab's torch breaks the rest of it
SCRIPTS = Path(__file__).resolve().parents[1]
TAKEN = "chapters"  # the results file with each chapter's seconds


class WorkerFailed(RuntimeError):
    """A command after `!` ended with an exit code other than 0."""


def start(chapter: str) -> None:
    """Make this kernel ready, and say so: check torch, let `!python` be this kernel's python, let `!` fail aloud.

    Running it again changes nothing. chapter: the stem of the notebook's name, for how long its runs take. Raises
    RuntimeError where torch is older than `TORCH_FLOOR`.
    """
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_FLOOR:
        wanted = ".".join(map(str, TORCH_FLOOR))
        raise RuntimeError(f"torch is {torch.__version__}, and this book needs {wanted} or newer.")
    first, found = str(_folder_of_python()), os.environ.get("PATH", "")
    if found.split(os.pathsep)[0] != first:
        os.environ["PATH"] = os.pathsep.join([first, found])
    shell = get_ipython()
    if shell is not None:
        shell.system = run_command  # type: ignore[method-assign]  # on the object: Colab has overridden the method
    print(_ready(torch.__version__, chapter))


def _ready(torch_version: str, chapter: str) -> str:
    """Return the line that says what is here, and how long the chapter's runs take where `make bench` took it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS
    line = f"{jobs.READY}torch {torch_version.partition('+')[0]}, {jobs.plural(cores, 'core')}"
    seconds = results.load(TAKEN)["seconds"].get(chapter) if (results.FOLDER / f"{TAKEN}.json").exists() else None
    if seconds is None:
        return f"{line}."
    minutes = "less than a minute" if seconds < 60 else f"about {jobs.plural(round(seconds / 60), 'minute')}"
    return f"{line}; this chapter's runs take {minutes}."


def _folder_of_python() -> Path:
    """Return a folder whose `python` is this kernel's: its own, or one that is made where it has only a `python3`."""
    here = Path(sys.executable)
    python = here.with_name("python")
    if python.exists() and python.samefile(here):
        return here.parent
    made = Path(session.directory()) / "bin"  # which goes with this process
    made.mkdir(exist_ok=True)
    # no link: an interpreter looks beside itself for the environment that it belongs to
    (made / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(str(here))} "$@"\n')
    (made / "python").chmod(0o755)
    return made


def run_command(command: str) -> None:
    """Run what follows a `!`, printing its lines as they come. Interrupting the cell interrupts the command.

    IPython's own `!` ignores exit codes and lends the command a terminal, so that a failed worker passes for a good
    one and progress bars stay behind in the page. Raises WorkerFailed for an exit code other than 0.
    """
    shell = get_ipython()
    if shell is None:
        raise RuntimeError("run_command stands for `!` in a notebook; elsewhere, use subprocess.run.")
    command = shell.var_expand(command, depth=1)
    with subprocess.Popen(
        command,
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},  # lines come when they are printed, errors in their place
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
            process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            raise
    shell.user_ns["_exit_code"] = process.returncode
    if process.returncode:
        raise WorkerFailed(f"`{command}` ended with exit code {process.returncode}; what it printed says why.")


def source(*objects: Any, fold: str = "") -> None:
    """Show the source of functions, methods or classes as it stands in its file: what is shown is what runs.

    fold: a summary to hide the source behind until it is clicked.
    """
    text = "\n\n".join(map(_listing, objects))
    display(Markdown(f"<details><summary>{fold}</summary>\n\n{text}\n\n</details>" if fold else text))


def folded(lines: Sequence[str], summary: str) -> None:
    """Show lines of a table behind a summary, until it is clicked."""
    text = "\n".join(lines)
    display(Markdown(f"<details><summary>{summary}</summary>\n\n```text\n{text}\n```\n\n</details>"))


def picture(figure: Figure, alt: str) -> None:
    """Show a figure with its description for those who cannot see it: the alt text of the book's page."""
    image = style.png(figure, alt)
    display({"image/png": image, "text/plain": alt}, raw=True)


def screenshot(file: str) -> None:
    """Show a picture of book/figures that no code of a chapter can draw, with the description that lies in it."""
    path = results.ROOT / "book" / "figures" / file
    with Image.open(path) as image:
        display({"image/png": path.read_bytes(), "text/plain": image.info["Description"]}, raw=True)


def moving(name: str, frames: Sequence[player.Frame]) -> None:
    """Show frames one after the other, with Back, Step, Play and a slider; their alt texts are its words.

    name: its own on the page; see muonbook.figures.player.
    """
    widget(player.html(name, frames), player.words(frames))


def widget(html: str, words: str) -> None:
    """Show HTML that brings its own script, and in words what it is to those who do not see it."""
    display({"text/html": html, "text/plain": words}, raw=True)


def _listing(thing: Any) -> str:
    thing = inspect.unwrap(getattr(thing, "fget", thing))  # a property is shown by what it calls
    file = Path(inspect.getsourcefile(thing) or "").resolve().relative_to(SCRIPTS.parent)
    return f"From `{file.as_posix()}`:\n\n```python\n{textwrap.dedent(inspect.getsource(thing)).rstrip()}\n```"
