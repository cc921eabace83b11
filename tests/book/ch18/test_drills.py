"""Drills, one of each kind, against their own rows in the stored table: what the book shows is what was seen here."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import stored_pages
import train
import worlds

from distmuon.extras.checkpoint import runs
from distmuon.launch import WorldError
from muonbook.ch18 import outages
from muonbook.ch18.checkpoint_contents import same_end
from muonbook.ch18.drills import table
from muonbook.ch18.drills.drills import OF_RANKS, TRIES
from muonbook.ch18.drills.harness import EVERY, STEPS, Attempt, DrillFailed, DrillGround
from muonbook.measure import results

WORKER = str(worlds.ROOT / "scripts" / "18_beyond_one_machine.py")
ONE_OF_EACH = (
    "killed in a collective",
    "left without a word",
    "an exception",
    "a stopped rank",
    "killed while writing",
    "killed before the rename",
    "killed while removing",
    "a full disk",
    "a flipped bit",
    "every checkpoint damaged",
    "a storm of NaN",
    "asked to stop",
    "killed as a whole",
)
ON_MACHINES = (  # where the others fall silent, the chapter's own run and test_machines see the same
    "an agent is killed",
    "the machine at which all meet loses its power",
    table.STAYS_AWAY,
    table.JOINS,
)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> DrillGround:
    return DrillGround(tmp_path_factory.mktemp("drills"))


def stored() -> dict[str, dict[str, Any]]:
    return {row["drill"]: row for row in results.load("drills")["drills"]}


def unmeasured(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "after"}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_drill_ends_as_it_is_stored(ground: DrillGround, name: str) -> None:
    row = table.ON_GROUND[name](ground, name)
    assert unmeasured(row._asdict()) == unmeasured(stored()[name])
    worlds.assert_worlds_left_nothing()


@pytest.mark.alone  # its collectives wait for 5 s at most, which in a crowd run out too often
@pytest.mark.timeout(1500)
def test_a_drill_on_machines_ends_as_it_is_stored(tmp_path: Path) -> None:
    """Whether machines may have networks of their own or share one: what comes of the drill is the same."""
    ending = worlds.finish(WORKER, "--drill", *ON_MACHINES, "--json", str(tmp_path / "drills.json"))
    assert ending.code == 0, ending.err
    rows = json.loads((tmp_path / "drills.json").read_text())["drills"]
    assert [row["drill"] for row in rows] == list(ON_MACHINES)
    for row in rows:
        assert unmeasured(row) == unmeasured(stored()[row["drill"]])


def test_of_what_a_machine_says_the_cause_is_told_and_not_its_echo() -> None:
    outage = outages.OUTAGES["a cable is pulled"]
    echo = "rank 1: Connection closed by peer [10.0.0.1]"
    said = f"{echo}\nrank 0: Timed out waiting 3000ms for recv"
    assert outages.most_telling(outage, said) == "Timed out waiting 3000ms"
    assert outages.most_telling(outage, echo) == "Connection closed by peer"
    with pytest.raises(WorldError, match="a says none of"):
        outages.most_telling(outage, "all is well")


def test_the_stored_table_is_whole_and_says_what_the_page_says_of_it() -> None:
    rows = stored()
    assert list(rows) == list(table.NAMES)
    for row in rows.values():
        assert row["lost"] <= EVERY, row  # no more than lies between two checkpoints
        if row["after"] is not None:
            assert row["after"] < 20, row
            assert row["when"] != table.AT_TIMEOUT or row["after"] >= 0.99, row
    ends = Counter(row["end"] for row in rows.values())
    same, ranks, skipped = (ends.pop(end) for end in (table.SAME, table.SAME_RANKS, "one step short of it"))
    assert (ranks, skipped, ends) == (2, 1, {})
    page = stored_pages.prose("18_beyond_one_machine")
    assert f"We have played {len(rows)} failures to the end" in page
    assert f"So in {same} of {len(rows)} the last checkpoint is the same bit for bit." in page


# ---- What must not pass -----------------------------------------------------------------------------------

NAME = "killed with gradients"
KILLED = Attempt(None, "rank 0 was killed by SIGKILL before it had finished", "", reached=6, first=0, late=0.0)
AGAIN = Attempt(train.Ended(STEPS), None, "", reached=STEPS, first=4, late=None)


def played(monkeypatch: pytest.MonkeyPatch, ground: DrillGround, *attempts: Attempt) -> table.Row:
    """Return what comes of a drill whose starts end so, one after the other; the run's end is taken for right."""
    coming = iter(attempts)
    monkeypatch.setattr(ground, "attempt", lambda *_, **__: next(coming))
    monkeypatch.setattr(ground, "end", lambda _: table.SAME)
    return table.ON_GROUND[NAME](ground, NAME)


def test_a_training_that_a_busy_machine_ends_before_its_fault_is_begun_again(
    ground: DrillGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_vain = KILLED._replace(error="rank 0 waited in vain for its peers.", late=None)
    assert unmeasured(played(monkeypatch, ground, in_vain, KILLED, AGAIN)._asdict()) == unmeasured(stored()[NAME])
    with pytest.raises(DrillFailed, match="failed 10 times before anything had happened"):
        played(monkeypatch, ground, *[in_vain] * TRIES)


@pytest.mark.parametrize(
    ("wrong", "again", "says"),
    [
        ({"lost": 1}, AGAIN, "2 steps were lost, not 1"),
        ({"says": ("rank 1 was killed by SIGKILL",)}, AGAIN, "nothing says 'rank 1 was killed by SIGKILL'"),
        ({"when": table.AT_TIMEOUT}, AGAIN, "not seen at the timeout"),
        ({}, KILLED, "did not go on: rank 0 was killed"),
        ({}, AGAIN._replace(ended=train.Ended(8)), r"did not go on: Ended\(step=8"),
    ],
)
def test_a_drill_that_goes_otherwise_fails(
    ground: DrillGround, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], again: Attempt, says: str
) -> None:
    monkeypatch.setitem(OF_RANKS, NAME, OF_RANKS[NAME]._replace(**wrong))
    with pytest.raises(DrillFailed, match=says):
        played(monkeypatch, ground, KILLED, again)


def test_an_end_is_another_in_one_bit_or_with_something_left_over(ground: DrillGround, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ground.undisturbed, run)
    assert same_end(run, ground.undisturbed)
    (run / ".unfinished-step-1").mkdir()
    assert not same_end(run, ground.undisturbed)
    (run / ".unfinished-step-1").rmdir()
    file = runs.at_step(run, STEPS) / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert not same_end(run, ground.undisturbed)
    shutil.rmtree(runs.at_step(run, STEPS))
    assert not same_end(run, ground.undisturbed)
