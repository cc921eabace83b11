"""The soak in short, what it would not let pass, and the long one that is stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import worlds

from distmuon.launch import WorldError
from muonbook.ch18 import checkpoint_contents, soak
from muonbook.ch18.cluster import Cluster
from muonbook.ch18.drills.faults import Footprint
from muonbook.measure import results

WORKER = str(worlds.ROOT / "scripts" / "18_beyond_one_machine.py")


def test_a_short_soak_ends_at_the_undisturbed_loss_and_leaks_nothing(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    words = ["--soak", "--steps", "60", "--ranks", "2", "--kill-every", "15", "--json", str(file)]
    ending = worlds.finish(WORKER, *words)
    assert (ending.code, ending.err) == (0, "")
    found = json.loads(file.read_text())
    assert len(found["kills"]) == 3
    assert found["end"] == soak.SAME
    for grown in found["growth"].values():
        assert grown["last"]["files"] <= grown["first"]["files"]


def test_how_often_a_training_saves_is_what_was_asked_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", every=7, apart=False)
    saves = [soak.Soak(save=3).settings(tmp_path).save_every, cluster.settings()["save_every"]]
    assert saves == [3, 7]
    command = cluster.command(cluster.machines[0])
    assert command[command.index("--save-every") + 1] == "7"


def test_the_loss_that_is_told_is_that_of_the_last_step(tmp_path: Path) -> None:
    lines = ['{"step": 1, "scalars": {"loss": 3.0}}', '{"step": 2, "scalars": {"loss": 2.5}}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 2, "scalars": {"held_out_loss": 4.0}}']))
    assert (checkpoint_contents.reached(tmp_path), checkpoint_contents.last_loss(tmp_path)) == (2, 2.5)


def test_the_stored_soak_is_the_long_one() -> None:
    found = results.load("soak")
    assert soak.Soak(**found["plan"]) == soak.Soak()
    assert found["plan"]["steps"] == 2000
    assert len(found["kills"]) == 19
    assert found["end"] == soak.SAME


def test_what_grows_is_named() -> None:
    calm = [Footprint(100.0, 9), Footprint(101.0, 9)]
    assert soak._growth("it", calm)["last"] == {"memory": 101.0, "files": 9}
    for last in (Footprint(110.0, 9), Footprint(100.0, 10)):
        with pytest.raises(WorldError, match=r"it: from .* to .*; something is not given back"):
            soak._growth("it", [calm[0], last])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--soak --steps 100", "--steps 100: nobody would be killed with --kill-every 100; choose at least 200."),
        ("--soak --ranks 1", "--ranks 1: must be from 2 to 64."),
        ("--steps 100", "--steps does nothing by itself; it goes with --soak."),
        ("--drill fire", "--drill fire: there is no such drill;"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words: str, says: str) -> None:
    ending = worlds.answer(WORKER, *words.split())
    assert (ending.code, ending.out) == (2, "")
    assert says in ending.err
