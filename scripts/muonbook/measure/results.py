"""Results files: what `make bench` measured, where it stands, and under what circumstances.

Chapters 4 and 12 to 15 and the claims page read numbers from book/results; nothing on a page is typed by hand.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distmuon import launch
from muonbook import jobs

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "book" / "results"


def load(name: str) -> dict[str, Any]:
    """Return book/results/{name}.json. Raises UsageError, naming the command that makes it, if it is not there."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        raise launch.UsageError(f"book/results/{name}.json is not there; `make bench` writes it.")
    return jobs.from_json(path.read_text(encoding="utf-8"))


def write(path: str | Path, found: dict[str, Any]) -> None:
    """Write a results file: what was found, and before it what `made_by` says."""
    jobs.write_json(str(path), made_by() | found)


def made_by() -> dict[str, Any]:
    """Return the machine, its versions, the commit and the command: what every results file says of itself.

    The command is stored without the file's own name, which may be a path of one machine.
    """
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if "--json" in words[:-1]:
        del words[(place := words.index("--json")) : place + 2]
    return {"machine": jobs.machine(), "commit": commit(), "command": " ".join(words)}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, quartiles and count: how a repeated measurement is stored."""
    if len(values) == 1:
        return {"median": values[0], "quartiles": [values[0], values[0]], "count": 1}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high], "count": len(values)}


def commit() -> str | None:
    """Return the commit the numbers belong to, marked if the code differs from it; None outside a clone.

    Prose, other results and the pages that show them may differ: one `make bench` rewrites them one after the other.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        prose = (":(exclude)book", ":(exclude)notebooks", ":(exclude)*.md")
        same = _git("diff", "--quiet", "HEAD", "--", ".", *prose).returncode == 0
    except OSError:
        return None
    return head.stdout.strip() + ("" if same else "-dirty") if head.returncode == 0 else None


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
