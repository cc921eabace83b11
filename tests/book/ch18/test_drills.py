"""Every drill, against its own row in the stored table: what the book shows is what was seen here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import worlds
from patient_commands import WORKER, finish

from distmuon import launch
from distmuon.launch import WorldError
from distmuon.models import run_settings
from muonbook.ch18 import demo, outages
from muonbook.ch18.drills import table
from muonbook.ch18.drills.faults import Fault
from muonbook.ch18.drills.harness import EVERY, DrillFailed, DrillGround, words_of
from muonbook.ch18.drills.ranks import DRILLS, RankDrill
from muonbook.measure import results

TOLD = demo.AFTERWARDS  # on machines, by the chapter's own run and in test_machines
ON_MACHINES = (*(name for name in outages.OUTAGES if name not in TOLD), table.STAYS_AWAY, table.JOINS)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> DrillGround:
    return DrillGround(tmp_path_factory.mktemp("drills"))


def stored() -> dict[str, dict[str, Any]]:
    return {row["drill"]: row for row in results.load("drills")["drills"]}


def unmeasured(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "after"}


@pytest.mark.parametrize("name", table.ON_GROUND)
def test_a_drill_ends_as_it_is_stored(ground: DrillGround, name: str) -> None:
    row = table.ON_GROUND[name](ground, name)
    assert unmeasured(row._asdict()) == unmeasured(stored()[name])
    worlds.assert_worlds_left_nothing()


@pytest.mark.alone  # its collectives wait for 5 s at most, which in a crowd run out too often
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ON_MACHINES)
def test_a_drill_on_machines_ends_as_it_is_stored(tmp_path: Path, name: str) -> None:
    """Whether machines may have networks of their own or share one: what comes of the drill is the same."""
    ending = finish(WORKER, "--drill", name, "--json", str(tmp_path / "drills.json"))
    assert ending.code == 0, ending.err
    (row,) = json.loads((tmp_path / "drills.json").read_text())["drills"]
    assert unmeasured(row) == unmeasured(stored()[name])


def test_of_what_a_machine_says_the_cause_is_told_and_not_its_echo() -> None:
    outage = outages.OUTAGES["a cable is pulled"]
    echo = "rank 1: Connection closed by peer [10.0.0.1]"
    said = f"{echo}\nrank 0: Timed out waiting 3000ms for recv"
    assert outages.most_telling(outage, said) == "Timed out waiting 3000ms"
    assert outages.most_telling(outage, echo) == "Connection closed by peer"
    with pytest.raises(WorldError, match="a says none of"):
        outages.most_telling(outage, "all is well")


def test_the_stored_table_is_whole_and_says_nothing_that_must_not_be() -> None:
    rows = stored()
    assert list(rows) == list(table.NAMES)
    assert len(rows) >= 40
    at_the_bits = [row for row in rows.values() if row["end"].startswith(table.SAME)]
    assert len(at_the_bits) == len(rows) - 4  # three commands that begin nothing, and one step that is skipped
    for row in rows.values():
        assert row["lost"] <= EVERY, row  # no more than lies between two checkpoints
        if row["after"] is not None:
            assert row["after"] < 20, row
            assert row["when"] != table.AT_TIMEOUT or row["after"] >= 0.99, row


def test_a_training_that_a_busy_machine_ends_before_its_fault_is_begun_again(
    ground: DrillGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, tried = ground.attempt, []

    def attempt(drill: str, faults: tuple[Fault, ...] = (), *more: Any, **changes: Any) -> Any:
        tried.append(drill)
        found = honest(drill, faults, *more, **changes)
        return found if len(tried) > 1 else found._replace(error="rank 0 waited in vain for its peers.", late=None)

    monkeypatch.setattr(ground, "attempt", attempt)
    name = "killed before the first step"
    assert unmeasured(table.ON_GROUND[name](ground, name)._asdict()) == unmeasured(stored()[name])
    assert len(tried) == 3  # in vain, until it happened, and to the end


# ---- What must not pass -----------------------------------------------------------------------------------


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> dict[str, RankDrill]:
    """Drills that are described wrongly; nobody else sees them."""
    drill = DRILLS["killed with gradients"]
    found = {
        "too much lost": drill._replace(lost=1),
        "another rank": drill._replace(says=("rank 1 was killed by SIGKILL",)),
        "another time": drill._replace(when=table.AT_TIMEOUT),
        "another end": drill._replace(faults=(Fault("nan", "loss", 7, 0),), says=()),
    }
    for name, one in found.items():
        monkeypatch.setitem(DRILLS, name, one)
    return found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too much lost", "2 steps were lost, not 1"),
        ("another rank", "nothing says 'rank 1 was killed by SIGKILL'"),
        ("another time", "not seen at the timeout"),
        ("another end", "the end is not the undisturbed one"),
    ],
)
def test_a_drill_that_goes_otherwise_fails(
    ground: DrillGround, wrong: dict[str, RankDrill], name: str, says: str
) -> None:
    with pytest.raises(DrillFailed, match=says):
        table.ON_GROUND["killed with gradients"](ground, name)


def test_what_is_not_among_the_drills_is_refused() -> None:
    with pytest.raises(launch.UsageError, match="--drill fire: there is no such drill; there are killed before"):
        table.asked_for(["fire"])
    assert table.asked_for(["a machine joins", "an exception"]) == ["an exception", "a machine joins"]


def test_settings_as_words_are_understood() -> None:
    words = ["--width", "16", "--save-every", "4", "--folder", "x"]
    assert words_of({"width": 16, "save_every": 4, "folder": "x"}) == words
    assert run_settings.parse("", words)[1].save_every == 4


def test_what_the_page_says_of_all_drills_is_stored() -> None:
    """46 of 52 end bit for bit as an undisturbed training; of the other six, three, two and one."""
    ends = sorted(row["end"] for row in stored().values())
    assert len(ends) == 52
    assert ends.count("to the bit") == 46
    others = [end for end in ends if end != "to the bit"]
    assert (
        others
        == ["as it was: nothing was begun"] * 3
        + ["one step short of it"]
        + ["to the bit, of the same numbers of ranks"] * 2
    )
