"""Run the tests of this folder, and store what came of each, on which GPUs and versions: what `make gpu` calls.

python tests/gpu/run_on_gpus.py book/results/gpu.json
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


class Outcomes:
    """A plugin of pytest's: what came of each test. {name: "passed", "failed", or why it was skipped}."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.skipped and isinstance(report.longrepr, tuple):
            self.found[name] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed or report.when == "call":
            self.found[name] = report.outcome


def gpus() -> dict[str, Any]:
    """Return what the outcomes depend on besides the machine: the GPUs, their driver, CUDA's and NCCL's versions."""
    import torch

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, IndexError, subprocess.CalledProcessError):
        driver = None
    return {
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "driver": driver,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "date": datetime.date.today().isoformat(),
    }


def main(path: str) -> int:
    """Return pytest's exit code. The file is written only where there is a GPU: elsewhere nothing has been tried."""
    outcomes = Outcomes()
    code = pytest.main([str(Path(__file__).parent), "-rs"], plugins=[outcomes])
    import torch

    if not torch.cuda.is_available():
        print(f"torch sees no GPU here, so nothing was tried, and {path} stays as it was.")
        return int(code)
    from muonbook.measure import results  # found from here on: pytest has put scripts/ on the path

    results.write(path, gpus() | {"tests": outcomes.found})
    print(f"Written to {path}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
