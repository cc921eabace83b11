"""The script for a GPU box, tried without a GPU: its parts, its limits, and what it needs to be installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_jobs
import gpu_parts
import one_gpu
import pytest
import run_on_gpus
import worlds

pytestmark = pytest.mark.skipif(gpu_jobs.GPUS > 0, reason="there is a GPU here, so the script itself is run.")
ELSEWHERE = ("playwright", "playwright.sync_api", "nbformat", "nbclient", "IPython")  # what no GPU box has


@pytest.mark.parametrize(("name", "rows"), [("numerics", 24), ("speed", 1), ("steps", 5)])
def test_a_part_runs_without_a_gpu_and_finds_a_row_for_everything(name: str, rows: int) -> None:
    found: dict[str, Any] = {}
    gpu_parts.PARTS[name](found)
    assert len(found["rows"]) == rows
    assert found.get("right", True)
    json.dumps(found)


def test_the_script_keeps_what_its_parts_find_and_calls_a_dry_run_by_that_name(tmp_path: Path) -> None:
    words = [sys.executable, "tests/gpu/one_gpu.py", str(tmp_path), "collectives"]
    done = subprocess.run(words, cwd=worlds.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"dry_run.json", "dry_run.txt"}
    found = json.loads((tmp_path / "dry_run.json").read_text(encoding="utf-8"))
    assert {"machine", "commit", "command", "gpus", "driver", "date"} <= set(found)
    assert found["parts"]["collectives"]["ended"] == "well"
    assert found["collectives"]["right"]
    assert found["collectives"]["fsdp2_away"] == 0
    assert str(tmp_path) not in json.dumps(found)


@pytest.mark.parametrize(
    ("then", "ended"), [("sys.exit(3)", "with exit code 3"), ("time.sleep(600)", "at its limit of 10 s"), ("", "well")]
)
def test_a_part_that_dies_or_hangs_leaves_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, ended: str
) -> None:
    script = tmp_path / "part.py"
    script.write_text(f"import sys, time; open(sys.argv[2], 'w').write('[1]'); print('so far'); {then}")
    monkeypatch.setitem(one_gpu.PARTS, "numerics", one_gpu.Part(str(script), 60, 1))
    outcome, found, said = one_gpu.take("numerics", 10, 1, tmp_path)
    assert (outcome["ended"], found, said) == (ended, [1], "so far\n")


def test_all_parts_together_take_less_than_eight_minutes() -> None:
    assert one_gpu.SECONDS < 480


def test_of_a_failure_the_last_words_are_kept(tmp_path: Path) -> None:
    outcomes = run_on_gpus.Outcomes(tmp_path / "tests.json")
    told = "\n".join(f"line {number}" for number in range(100))
    reports: list[tuple[str, Any, Any]] = [
        ("one", "passed", None),
        ("two", "failed", told),
        ("three", "skipped", ("file", 1, "Skipped: needs a GPU")),
    ]
    for name, outcome, reason in reports:
        report = pytest.TestReport(f"test_x.py::{name}", ("test_x.py", 1, name), {}, outcome, reason, "call")
        outcomes.pytest_runtest_logreport(report)
    found = json.loads((tmp_path / "tests.json").read_text(encoding="utf-8"))
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["passed"] == ["one"]
    assert found["skipped"] == {"three": "needs a GPU"}
    assert found["failed"]["two"][-1] == "line 99"
    assert len(found["failed"]["two"]) == run_on_gpus.LINES


def test_a_box_without_browser_and_notebooks_can_collect_these_tests() -> None:
    program = (
        f"import sys, pytest; sys.modules.update(dict.fromkeys({ELSEWHERE!r})); sys.exit(pytest.main(sys.argv[1:]))"
    )
    folder = str(Path(__file__).parent)
    words = [
        sys.executable,
        "-c",
        program,
        folder,
        f"--confcutdir={folder}",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:nbval",
    ]
    done = subprocess.run(words, cwd=worlds.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
