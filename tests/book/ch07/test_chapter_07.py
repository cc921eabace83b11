"""Chapter 7's worker: every rank draws the same map, and what it prints is what the map says."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).resolve().parents[3] / "scripts" / "07_virtual_map.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, WORKER, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (("--dp", "4"), ["DP rank 1 owns   W1[26:48] b1[0:4] b2[2:4]", "Each rank sent 312 bytes (all-gathers: 1)."]),
        (("--dp", "3", "--bucket-size", "1"), ["DP rank 0 owns   W1[0:16] b1[0:3] W2[0:16] b2[0:2]"]),
        (
            ("--dp", "1"),
            ["DP rank 0 owns   W1[0:48] b1[0:8] W2[0:48] b2[0:6]", "Each rank sent 0 bytes (all-gathers: 0)."],
        ),
    ],
)
def test_each_rank_owns_what_the_map_says_and_gets_its_pieces_back(
    arguments: tuple[str, ...], lines: list[str]
) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(lines) <= set(done.stdout.splitlines())
    assert done.stdout.count(": True.") == 3


def test_a_bucket_of_nothing_is_refused() -> None:
    done = run("--bucket-size", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --bucket-size 0: must be from 1 to 1,000,000,000.\n"
