"""Chapter 11's worker: its table says of every exhibit what tests/book/ch11/test_museum.py holds it to."""

import importlib

import pytest
import stored_pages
import worlds
from test_museum import CAUGHT_BY

from muonbook.ch11.museum import EXHIBITS
from muonbook.ch11.museum_tour import SCENARIOS

WORKER = str(worlds.ROOT / "scripts" / "11_bug_museum.py")


def test_the_table_counts_the_alarms_that_the_museum_names() -> None:
    out = stored_pages.printed("11_bug_museum", "python ../scripts/11_bug_museum.py --json out/11.json")
    rows = {line[:30].strip(): [0 if n == "." else int(n) for n in line[30:].split()] for line in out.splitlines()[1:]}
    for name, alarms in CAUGHT_BY.items():
        count = [sum(alarm.endswith(f": {kind}") for alarm in alarms) for kind in ("raises", "result", "bytes")]
        assert rows[name or "healthy"] == [*count, 0], name
    assert len(SCENARIOS) == 5  # as the chapter says


@pytest.mark.parametrize("name", ["Block-Wise Newton-Schulz", "block-wise Newton–Schulz"])
def test_an_exhibit_is_found_however_it_is_spelled(name: str) -> None:
    assert importlib.import_module("11_bug_museum").exhibit_name(name, list(EXHIBITS)) == "block-wise Newton–Schulz"


def test_an_unknown_exhibit_is_answered_with_those_there_are() -> None:
    done = worlds.answer(WORKER, "--exhibit", "the Mona Lisa")
    assert done.code == 2
    assert "'the Mona Lisa' is not in the museum; choose one of healthy, stale group parameters" in done.err
