"""Chapter 11's worker: its table says of every exhibit what tests/book/ch11/test_museum.py holds it to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_museum import CAUGHT_BY

from muonbook.ch11.museum_tour import SCENARIOS

WORKER = Path(__file__).resolve().parents[3] / "scripts" / "11_bug_museum.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, WORKER, *arguments], capture_output=True, text=True)


def test_the_table_counts_the_alarms_that_the_museum_names(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "tour.json"))
    assert (done.returncode, done.stderr) == (0, "")
    rows = {
        line[:30].strip(): [0 if n == "." else int(n) for n in line[30:].split()]
        for line in done.stdout.splitlines()[1:]
    }
    for name, alarms in CAUGHT_BY.items():
        count = [sum(alarm.endswith(f": {kind}") for alarm in alarms) for kind in ("raises", "result", "bytes")]
        assert rows[name or "healthy"] == [*count, 0], name
    tour = json.loads((tmp_path / "tour.json").read_text(encoding="utf-8"))
    assert tour["healthy"][1:] == [
        "  all scenarios      right, to the last bit; bytes as predicted",
        "  replicas           all ranks agree",
    ]
    assert tour["stale group parameters"][1:3] == [
        "  two groups         WRONG: columns, rows, whole, other; bytes as predicted",
        "  the others         right, to the last bit; bytes as predicted",
    ]
    assert len(SCENARIOS) == 5  # as the chapter says


@pytest.mark.parametrize("name", ["Block-Wise Newton-Schulz", "block-wise Newton–Schulz"])
def test_an_exhibit_is_found_however_it_is_spelled(name: str) -> None:
    assert run("--exhibit", name).stdout.startswith("block-wise Newton–Schulz, on 2 DP x 2 TP ranks")


def test_an_unknown_exhibit_is_answered_with_those_there_are() -> None:
    done = run("--exhibit", "the Mona Lisa")
    assert done.returncode == 2
    assert "'the Mona Lisa' is not in the museum; choose one of healthy, stale group parameters" in done.stderr
