"""Run the tests of this folder side by side, and store what came of each: the last part of `one_gpu.py`.

pytest stops at this folder, because tests/conftest.py imports a browser and notebooks, which no GPU box has.

python tests/gpu/run_on_gpus.py tests out/tests.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LINES, WIDTH = 40, 240  # of what a failed test said last


class Outcomes:
    """A plugin of pytest's, which keeps what came of each test in a file, as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: list[str] = []
        self.skipped: dict[str, str] = {}  # why
        self.failed: dict[str, list[str]] = {}  # the last lines of what it said

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[name] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            said = report.longreprtext.replace(f"{ROOT}/", "").replace(f"{sys.prefix}/", "")  # of one machine alone
            self.failed[name] = [line[:WIDTH] for line in said.splitlines()[-LINES:]]
        elif report.when == "call":
            self.passed.append(name)
        self.path.write_text(json.dumps(self.found()), encoding="utf-8")

    def found(self) -> dict[str, Any]:
        kinds: dict[str, Collection[str]] = {"passed": self.passed, "skipped": self.skipped, "failed": self.failed}
        counts = {kind: len(names) for kind, names in kinds.items()}
        skipped = dict(sorted(self.skipped.items()))
        return {"counts": counts, "failed": self.failed, "passed": sorted(self.passed), "skipped": skipped}


def main(_: str, path: str) -> int:
    """Return pytest's exit code. The first argument is the part's name, as for the other parts' script."""
    options = [f"--confcutdir={HERE}", "-p", "no:cacheprovider", "--tb=short"]
    if find_spec("xdist"):  # each starts up to eight ranks, and two cores keep one command going
        options += ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2)))]
    outcomes = Outcomes(Path(path))
    code = int(pytest.main([str(HERE), *options], plugins=[outcomes]))
    for name, said in outcomes.failed.items():
        print("\n".join([f"FAILED {name}", *said]))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
