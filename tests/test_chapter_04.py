"""Chapter 4's worker: each of its ways to be called, what it stores, and wrong arguments answered in a sentence."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import worlds

from distmuon.learning import datasets, sweep

worker = import_module("04_does_it_learn")
WORKER = str(worlds.ROOT / "scripts" / "04_does_it_learn.py")


def test_settings_that_are_given_are_run_without_tuning(tmp_path: Path) -> None:
    target = tmp_path / "new" / "runs.json"
    ending = worlds.finish(
        WORKER, "--task", "digits", "--lr", "0.02", "0.005", "--optimizer", "muon", "adamw",
        "--seeds", "2", "--steps", "20", "--dtype", "float64", "--json", str(target),
    )  # fmt: skip
    assert (ending.code, ending.err) == (0, "")
    lines = ending.out.splitlines()
    assert lines[0] == "digits, held-out loss"
    assert lines[1].split() == ["step", "Muon", "AdamW"]
    first, last = ([float(cell) for cell in line.split()] for line in (lines[2], lines[-1]))
    assert (first[0], last[0]) == (1, 20)
    assert all(after < before for before, after in zip(first[1:], last[1:], strict=True))
    runs = json.loads(target.read_text())["runs"]
    settings = {(run["setting"]["optimizer"], run["setting"]["lr"], run["seed"]) for run in runs}
    assert settings == {(name, lr, seed) for name, lr in (("muon", 0.02), ("adamw", 0.005)) for seed in (0, 1)}


def test_a_first_impression_of_a_race(tmp_path: Path) -> None:
    target = tmp_path / "race.json"
    ending = worlds.finish(WORKER, "--task", "digits", "--quick", "--steps", "3", "--json", str(target))
    assert (ending.code, ending.err) == (0, "")
    assert re.search(r"^digits, 3 steps of 128: held-out loss on 5 fresh seeds", ending.out)
    stored = json.loads(target.read_text())
    assert set(stored["racers"]) == set(worker.OPTIMIZERS)
    assert len(re.findall(r"against", ending.out)) == 3
    assert stored["command"].startswith("04_does_it_learn.py --task digits")


def test_the_same_curve_on_a_grid() -> None:
    ending = worlds.finish(
        WORKER, "--task", "digits", "--optimizer", "muon", "--lr", "0.02", "--steps", "10", "--dp", "2", "--tp", "2",
        "--dtype", "float64",
    )  # fmt: skip
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.splitlines()[-1] == "no loss differs by more than 1e-10 of the movement: True"
    rows = [line.split() for line in ending.out.splitlines()[1:-1]]
    assert rows
    assert all(on_grid == alone for _, on_grid, alone in rows)


def test_data_that_is_not_here_is_said_with_the_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets, "ROOT", tmp_path)
    assert worker.missing_data(["digits", "language"]) is None
    said = worker.missing_data(["mnist"])
    assert said is not None
    assert said.endswith("python scripts/04_does_it_learn.py --task mnist --fetch")
    monkeypatch.setattr("sys.argv", [WORKER, "--task", "cifar10", "--if-here"])
    assert worker.main() == 0
    assert "CIFAR-10 is not here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "imagenet"], "--task imagenet is unknown; choose from digits, language"),
        (["--task", "digits", "language"], "one race at a time"),
        (["--optimizer", "adam"], "--optimizer adam is unknown; choose from sgd, adamw, muon"),
        (["--dtype", "bfloat16"], "--dtype bfloat16 is unknown"),
        (["--recipe", "mine"], "--recipe mine is unknown; choose from original"),
        (["--recipe", "original", "--task", "digits"], "it is one for fashion, mnist, cifar10"),
        (["--seeds", "0"], "--seeds 0: must be from 1"),
        (["--tuning-seeds", "4"], "--tuning-seeds 4: must be from 1 to 3"),
        (["--lr", "0"], "--lr 0: give one positive number"),
        (["--lr", "1", "2"], "--lr 1 2: give one positive number, or one for each optimizer"),
        (["--dp", "2"], "name one --optimizer and its --lr"),
        (["--dp", "2", "--optimizer", "sgd", "--lr", "0.1"], "'sgd'"),
        (["--dp", "3", "--optimizer", "muon", "--lr", "0.1"], "--dp 3 cannot share out the 128 rows"),
        (["--fetch", "--task", "digits"], "it needs no download"),
        (["--check", "nowhere.py"], "nowhere.py"),
        (["--json", "/"], "--json /"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.finish(WORKER, *arguments)
    assert (ending.code, ending.out) == (2, "")
    assert words in ending.err
    assert ending.err.count("\n") == 1


def test_as_many_tuning_seeds_as_the_command_line_offers() -> None:
    assert len(sweep.TUNING_SEEDS) == 3
