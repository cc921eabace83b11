"""Chapter 4's worker: each of its ways to be called, what it stores, and wrong arguments answered in a sentence."""

from __future__ import annotations

import json
import statistics
from importlib import import_module
from pathlib import Path

import pytest
import stored_pages
import worlds

from muonbook.ch04 import image_datasets, jobs, search_space, stored, sweep, tables, tasks
from muonbook.ch04.studies import MATCHED
from muonbook.measure import results

worker = import_module("04_does_it_learn")
WORKER = str(worlds.ROOT / "scripts" / "04_does_it_learn.py")


def test_without_a_word_everything_is_tuned(tmp_path: Path) -> None:
    small = ["--task", "digits", "--optimizer", "sgd", "--steps", "2", "--quick", "--ranks", "1"]
    ending = worlds.answer(WORKER, *small, "--json", str(tmp_path / "found.json"))
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.startswith("digits, 2 steps of 128: held-out loss, median [range] of 5 fresh seeds\n")
    racer = json.loads((tmp_path / "found.json").read_text())["racers"]["sgd"]
    assert all(len(racer["grid"][tuned]) > 1 for tuned in ("lr", "weight_decay", "momentum", "others"))
    assert (racer["usual"]["best"]["momentum"], racer["usual"]["best"]["others"]) == (0.9, 1.0)
    assert len(racer["held_out"]) == len(racer["usual"]["held_out"]) == 5
    assert f"{racer['best']['lr']:9.3g}{racer['best']['others']:8.2g}" in ending.out


def test_data_that_is_not_here_is_said_with_the_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image_datasets, "FOLDER", tmp_path)
    assert jobs.missing_data(["digits", "language"]) is None
    said = jobs.missing_data(["mnist"])
    assert said is not None
    assert said.endswith("python scripts/04_does_it_learn.py --task mnist --fetch")
    monkeypatch.setattr("sys.argv", [WORKER, "--task", "mnist", "--if-here"])
    assert worker.main() == 0
    assert "MNIST is not here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "imagenet"], "--task imagenet is unknown; choose from digits, language"),
        (["--task", "digits", "language"], "one race at a time"),
        (["--optimizer", "adam"], "--optimizer adam is unknown; choose from sgd, adamw, muon"),
        (["--recipe", "original", "--task", "digits"], "it is one for mnist, fashion"),
        (["--tuning-seeds", "4"], "--tuning-seeds 4: must be from 1 to 3"),
        (["--optimizer", "muon", "muon"], "--optimizer muon muon: name each once"),
        (["--fetch", "--task", "digits"], "it needs no download"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert (ending.code, ending.out) == (2, "")
    assert words in ending.err
    assert ending.err.count("\n") == 1


def test_the_command_line_knows_every_task_and_optimizer() -> None:
    assert tuple(tasks.TASKS) == worker.TASKS
    assert tuple(image_datasets.SOURCES) == worker.FETCHED
    assert tuple(search_space.RACERS) == worker.OPTIMIZERS + worker.VARIANTS
    assert tuple(search_space.VARIANT_OPTIONS) == worker.VARIANTS
    assert len(sweep.TUNING_SEEDS) == 3  # which the command line offers


# ---- What the page says of stored studies -----------------------------------------------------------------


def test_what_the_page_says_of_the_races() -> None:
    digits, language, fashion = (results.load(f"race_{name}") for name in ("digits", "language", "fashion"))
    assert not any(found.claimed for found in tables.verdicts(digits).values())
    assert all(found.claimed for found in tables.verdicts(language).values())
    muon, adamw = (tables.gaps(language, name) for name in ("muon", "adamw"))
    assert max(muon) < min(adamw)
    assert statistics.median(muon) < 0.5 * statistics.median(adamw)
    counted = [tables.ngram_gap(language, order) for order in (5, 3)]
    assert counted[0] < statistics.median(muon) < statistics.median(adamw) < counted[1]
    assert f"{statistics.median(language['floor']):.2f}" == "0.62"  # of windows
    assert all(sweep.verdict(tables.gaps(fashion, "muon"), tables.gaps(fashion, o)).wins == 8 for o in ("adamw", "sgd"))
    muon, adamw = (tables.gaps(fashion, name) for name in ("muon", "adamw"))
    assert all(0.83 < a / b < 0.87 for a, b in zip(muon, adamw, strict=True))  # "by 15 per cent"


def test_what_the_contract_says_of_rates() -> None:
    rates = [results.load(f"race_{name}")["racers"] for name in ("language", "digits", "fashion")]
    first, second, third = (f"{race['muon']['best']['lr'] / race['adamw']['best']['lr']:.0f}" for race in rates)
    page = " ".join((worlds.ROOT / "book" / "contract.md").read_text(encoding="utf-8").split())
    assert f"Muon's best rate was {first}, {second} and {third} times AdamW's" in page
    said = f"the best rate of the matrices was {second}, {first} and {third} times that of the tuned AdamW"
    assert any(said in cell.source for cell in stored_pages.every_cell("04_does_it_learn"))


def test_what_the_page_says_of_prices() -> None:
    times = results.load("step_times")
    for name, cheap in (("language", True), ("fashion", False)):
        race, seconds = results.load(f"race_{name}"), times[name]
        share = tables.to_reach(race)
        assert 0.4 < share["steps"] < 0.5
        assert share["operations"] < 1 if cheap else round(share["operations"]) == 5
        assert share["steps"] * seconds["muon"]["median"] / seconds["adamw"]["median"] < 1
    tried = {name: racer["settings"] for name, racer in results.load("race_fashion")["racers"].items()}
    assert tried["adamw"] > 4 * tried["muon"]


def test_what_the_page_says_of_momentum() -> None:
    language = results.load("race_language")
    assert {language["racers"][name]["best"]["momentum"] for name in ("muon", "adamw")} == {0.6}
    assert [language["racers"][name]["best"]["others"] for name in ("muon", "adamw")] == [0.25, 1]
    for race, matrices, everything_else in (("digits", 1, 1 / 256), ("language", 8, 2), ("fashion", 4, 1)):
        muon, adamw = (results.load(f"race_{race}")["racers"][name]["best"] for name in ("muon", "adamw"))
        assert muon["lr"] / adamw["lr"] == pytest.approx(matrices)
        assert muon["lr"] * muon["others"] / (adamw["lr"] * adamw["others"]) == pytest.approx(everything_else)
    usual = {name: tables.gaps(language, name, usual=True) for name in ("muon", "adamw")}
    tuned = {name: tables.gaps(language, name) for name in usual}
    for name in usual:
        assert sweep.verdict(tuned[name], usual[name]).wins == 8
        assert 0.5 < statistics.median(tuned[name]) / statistics.median(usual[name]) < 0.6
    assert not sweep.verdict(usual["muon"], tuned["adamw"]).claimed
    assert sweep.verdict(usual["muon"], usual["adamw"]).wins == 8


def test_what_the_page_says_of_luck_in_tuning() -> None:
    digits = results.load("race_digits")
    racers = {name: digits["racers"][name] for name in ("muon", "adamw")}
    assert [racer["settings"] for racer in racers.values()] == [504, 252]
    chosen = {name: min(racer["curve"].values()) for name, racer in racers.items()}
    fresh = {name: statistics.median(tables.gaps(digits, name)) for name in racers}
    assert 1 - chosen["muon"] / chosen["adamw"] == pytest.approx(2 / 5, abs=0.02)
    assert 1 - fresh["muon"] / fresh["adamw"] == pytest.approx(1 / 7, abs=0.02)
    assert sweep.verdict(tables.gaps(digits, "muon"), tables.gaps(digits, "adamw")).losses == 2


def test_what_the_page_says_of_the_tutorials_recipe() -> None:
    found = results.load("learning")["originals"]["fashion"]
    written, tuned = found["as_written"], found["tuned"]
    compared = (
        (written, written, "training_loss"),
        (written, written, "test_loss"),
        (tuned, tuned, "test_loss"),
        (tuned, written, "test_loss"),
    )
    lower = [1 - a["median"]["muon"][loss] / b["median"]["adamw"][loss] for a, b, loss in compared]
    assert [f"{share:.0%}" for share in lower] == ["38%", "8%", "22%", "18%"]
    runs = results.load("originals")["fashion"]
    ends = [[run["test_loss"][-1] for run in runs[race]["adamw"]] for race in ("tuned", "as_written")]
    assert sweep.verdict(*ends).losses == 5  # tuning on two seeds has made AdamW worse
    assert sweep.verdict([run["test_loss"][-1] for run in runs["tuned"]["muon"]], ends[1]).wins == 5
    wins = [race["muon_against_adamw"][loss]["wins"] for race in (written, tuned) for loss in race["median"]["muon"]]
    assert wins == [5] * 6
    muon = [race["median"]["muon"] for race in (written, tuned)]
    assert [f"{one['training_loss']:.2f}" for one in muon] == ["0.21", "0.24"]
    assert muon[1]["test_loss"] < muon[0]["test_loss"]


def test_what_the_page_says_of_single_changes() -> None:
    stored = results.load("sights")
    rows, table = {what: gaps for what, *gaps in tables.changes(stored)}, tables.change_lines(stored)[1:]
    assert len(rows) == len(table) == 17
    for (what, (before, after)), line in zip(rows.items(), table, strict=True):
        found = sweep.verdict(after, before)
        gaps = [f"{statistics.median(values):.3f}" for values in (before, after)]
        verdict = f"{found.wins} of 5{', claimed' if found.wins in (0, 5) else ''}"
        assert line.split() == [*what.split(), *gaps, *verdict.split()]
    lead = {what: statistics.median(adamw) - statistics.median(muon) for what, (adamw, muon) in rows.items()}
    assert lead["Muon instead of AdamW, 16 windows a batch"] == pytest.approx(1 / 3, abs=0.03)
    assert 0 < lead["Muon instead of AdamW, 900 steps"] < 0.1
    wins = [sweep.verdict(muon, adamw).wins for what, (adamw, muon) in rows.items() if "windows" in what]
    assert wins == [5, 5, 5]
    choices = [what for what in rows if what.startswith("Muon trains") or "anew" in what or "none, Muon" in what]
    assert len(choices) == 7
    decay = {(row["optimizer"], row["steps"], row["weight_decay"]): row["gaps"] for row in stored["decay"]["rows"]}
    assert rows["decay 0.1 instead of none, AdamW, 900 steps"] == [decay["adamw", 900, 0.0], decay["adamw", 900, 0.1]]
    rms = {row["rms"]: row["gaps"] for row in stored["rms"]["tuned"]}
    assert rows["update RMS 0.8 instead of 0.2, rate tuned anew"] == [rms[MATCHED], rms[0.8]]
    assert all(abs(lead[what]) < 0.04 for what in choices)


def test_none_of_eight_variants_is_better_on_every_seed() -> None:
    count = 0
    for race in (results.load("race_variants"), results.load("race_normuon")):
        assert race["steps"] == 1000
        muon = tables.gaps(race, "muon")
        for name in race["racers"].keys() - {"muon"}:
            assert sweep.verdict(tables.gaps(race, name), muon).wins < 8
            count += 1
    assert count == 8


# ---- The summary that the claims page quotes --------------------------------------------------------------


def test_the_summary_is_that_of_what_is_stored() -> None:
    kept, found = results.load("learning"), stored.learning(quick=False)
    assert found == {name: kept[name] for name in found}
    language = results.load("race_language")
    both = zip(language["racers"]["muon"]["held_out"], language["floor"], strict=True)
    finals = [losses[-1] - floor for losses, floor in both]
    assert found["races"]["language"]["median"]["muon"] == pytest.approx(statistics.median(finals))
