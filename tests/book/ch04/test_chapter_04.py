"""Chapter 4's worker: each of its ways to be called, what it stores, and wrong arguments answered in a sentence."""

from __future__ import annotations

import json
import re
import statistics
from importlib import import_module
from pathlib import Path

import pytest
import worlds

from muonbook.ch04 import image_datasets, jobs, search_space, sweep, tables, tasks
from muonbook.ch04.tutorial import tables as originals_tables
from muonbook.measure import results

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
    assert (first[0], last[0]) == (5, 20)
    assert all(after < before for before, after in zip(first[1:], last[1:], strict=True))
    runs = json.loads(target.read_text())["runs"]
    settings = {(run["setting"]["optimizer"], run["setting"]["lr"], run["seed"]) for run in runs}
    assert settings == {(name, lr, seed) for name, lr in (("muon", 0.02), ("adamw", 0.005)) for seed in (0, 1)}


def test_a_first_impression_of_a_race(tmp_path: Path) -> None:
    target = tmp_path / "race.json"
    few = ("--quick", "--steps", "3", "--tune", "lr")
    ending = worlds.finish(WORKER, "--task", "digits", *few, "--json", str(target))
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.startswith("digits, 3 steps of 128: held-out loss, median [range] of 5 fresh seeds\n")
    stored = json.loads(target.read_text())
    assert set(stored["racers"]) == set(worker.OPTIMIZERS)
    assert len(re.findall(r"against", ending.out)) == 3
    assert stored["command"].startswith("04_does_it_learn.py --task digits")


def test_without_a_word_everything_is_tuned(tmp_path: Path) -> None:
    target = tmp_path / "race.json"
    few = ("--optimizer", "sgd", "--quick", "--steps", "2", "--json", str(target))
    ending = worlds.finish(WORKER, "--task", "digits", *few)
    assert (ending.code, ending.err) == (0, "")
    grid = json.loads(target.read_text())["racers"]["sgd"]["grid"]
    assert all(len(grid[tuned]) > 1 for tuned in ("lr", "weight_decay", "momentum", "others"))


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
    monkeypatch.setattr(image_datasets, "ROOT", tmp_path)
    assert jobs.missing_data(["digits", "language"]) is None
    said = jobs.missing_data(["mnist"])
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
        (["--optimizer", "muon", "muon"], "--optimizer muon muon: name each once"),
        (["--summary", "--times"], "--summary does nothing with --times"),
        (["--lr", "0.1", "--weight-decay", "-1"], "--weight-decay -1: must be from 0"),
        (["--lr", "0.1", "--momentum", "1"], "--momentum 1: must be from 0.01"),
        (["--lr", "0.1", "--others", "0"], "--others 0: must be from 0.0001"),
        (["--lr", "0.1", "--second-beta", "1"], "--second-beta 1: must be from 0.01"),
        (["--tune", "momentum"], "--tune momentum is unknown; choose from all, lr"),
        (["--tp", "0", "--optimizer", "muon", "--lr", "0.1"], "--tp 0: must be at least 1"),
        (["--times", "--backend", "nccl"], "--backend does nothing with --times"),
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
    ending = worlds.answer(WORKER, *arguments)
    assert (ending.code, ending.out) == (2, "")
    assert words in ending.err
    assert ending.err.count("\n") == 1


def test_the_command_line_knows_every_task_and_optimizer() -> None:
    assert tuple(tasks.TASKS) == worker.TASKS
    assert tuple(name for name in tasks.TASKS if name in image_datasets.SOURCES) == worker.FETCHED
    assert set(worker.FETCHED) == set(image_datasets.SOURCES)
    assert tuple(search_space.CANDIDATES) == worker.OPTIMIZERS
    assert tuple(search_space.VARIANTS) == worker.VARIANTS


def test_as_many_tuning_seeds_as_the_command_line_offers() -> None:
    assert len(sweep.TUNING_SEEDS) == 3


# ---- What the page says of stored studies -----------------------------------------------------------------


def test_what_the_page_says_of_the_races() -> None:
    digits, language, fashion = (results.load(f"race_{name}") for name in ("digits", "language", "fashion"))
    assert not any(found.claimed for found in tables.verdicts(digits).values())
    assert all(found.claimed for found in tables.verdicts(language).values())
    muon, adamw = (tables.gaps(language, name) for name in ("muon", "adamw"))
    assert max(muon) < min(adamw)
    assert statistics.median(muon) < 0.5 * statistics.median(adamw)
    counted = {order: statistics.median(gaps) for order, gaps in tables.ngram_gaps(language).items()}
    assert counted[5] < statistics.median(muon) < statistics.median(adamw) < counted[3]
    assert all(sweep.verdict(tables.gaps(fashion, "muon"), tables.gaps(fashion, o)).wins == 8 for o in ("adamw", "sgd"))


def test_what_the_contract_says_of_rates() -> None:
    rates = [results.load(f"race_{name}")["racers"] for name in ("language", "digits", "fashion")]
    first, second, third = (f"{race['muon']['best']['lr'] / race['adamw']['best']['lr']:.0f}" for race in rates)
    page = " ".join((worlds.ROOT / "book" / "contract.md").read_text(encoding="utf-8").split())
    assert f"Muon's best rate was {first}, {second} and {third} times AdamW's" in page


def test_what_the_page_says_of_prices() -> None:
    times = results.load("step_times")
    for name, cheap in (("language", True), ("fashion", False)):
        race, seconds = results.load(f"race_{name}"), times[name]
        share = tables.to_reach(race, "muon", "adamw")
        assert share is not None
        assert 0.4 < share["steps"] < 0.5
        assert share["operations"] < 1 if cheap else round(share["operations"]) == 5
        assert share["steps"] * seconds["muon"]["median"] / seconds["adamw"]["median"] < 1
    tried = {name: racer["settings"] for name, racer in results.load("race_fashion")["racers"].items()}
    assert tried["adamw"] > 4 * tried["muon"]


def test_what_the_page_says_of_momentum() -> None:
    language = results.load("race_language")
    assert {racer["best"]["momentum"] for racer in language["racers"].values()} == {0.6, 0.7}
    usual = {name: tables.gaps(language, name, usual=True) for name in ("muon", "adamw")}
    tuned = {name: tables.gaps(language, name) for name in usual}
    for name in usual:
        assert sweep.verdict(tuned[name], usual[name]).wins == 8
        assert 0.5 < statistics.median(tuned[name]) / statistics.median(usual[name]) < 0.6
    assert not sweep.verdict(usual["muon"], tuned["adamw"]).claimed
    assert sweep.verdict(usual["muon"], usual["adamw"]).wins == 8
    neither, muon, adamw, both = tables.advocacies(language, "muon", "adamw")
    assert [each.tuned for each in (neither, muon, adamw, both)] == ["neither", "Muon alone", "AdamW alone", "both"]
    assert muon.gaps == {"Muon": statistics.median(tuned["muon"]), "AdamW": statistics.median(usual["adamw"])}
    assert adamw.told == "Muon is ahead on 7 of 8 seeds: nothing may be claimed."
    assert both.told == "Muon is ahead on 8 of 8 seeds."


def test_what_the_page_says_of_the_tutorials_recipe() -> None:
    found = results.load("originals")["fashion"]
    told = {race: {o: originals_medians(runs) for o, runs in found[race].items()} for race in ("as_written", "tuned")}
    written, tuned = told["as_written"], told["tuned"]
    assert written["muon"][0] < 0.66 * written["adamw"][0]
    assert tuned["sgd"][0] < 0.66 * written["sgd"][0]
    assert found["tuned"]["sgd"][0]["lr"] / 0.01 == pytest.approx(32)
    assert tuned["adamw"][0] == pytest.approx(written["adamw"][0], rel=0.02)
    assert found["tuned"]["muon"][0]["lr"] < 0.01
    assert tuned["muon"][0] > written["muon"][0]
    assert tuned["muon"][1] < written["muon"][1]
    assert tuned["muon"][0] / tuned["adamw"][0] > written["muon"][0] / written["adamw"][0]
    assert tuned["adamw"][1] - tuned["muon"][1] > written["adamw"][1] - written["muon"][1]
    for comparison in originals_tables.verdicts(found):
        assert all(verdict.claimed and verdict.losses == 0 for verdict in comparison.verdicts.values()), comparison


def originals_medians(runs: list[dict]) -> tuple[float, float]:
    return tuple(statistics.median(run[key][-1] for run in runs) for key in ("training_loss", "test_loss"))
