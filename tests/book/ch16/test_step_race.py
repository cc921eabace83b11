"""Chapter 16's race: everybody makes Muon's step before anybody's time counts, and who is not here is named."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import race_workers
import stored_pages
import worlds

from distmuon import launch
from distmuon.sharding.grid import Grid
from muonbook import peers
from muonbook.ch16.race import four_ranks, step_race, tables
from muonbook.measure import results

WORKER = str(worlds.ROOT / "scripts" / "16_owner.py")
FOLDER = os.environ.get("PEERS")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--measure"], "add --json FILE"),
        (["--quick"], "--quick does nothing"),
        (["--measure", "--json", "x.json", "--peers", "/nowhere"], "--peers /nowhere: there is no such folder"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(arguments: list[str], words: str) -> None:
    ending = worlds.answer(WORKER, *arguments)
    assert ending.code == 2
    assert words in ending.err


# ---- Everybody --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_everybody_goes_where_the_polar_factor_points(dp: int, tp: int) -> None:
    here = [name for name, found in peers.find(FOLDER).items() if found["here"]]
    ranks = launch.run(race_workers.first_steps, (here, FOLDER), dp=dp, tp=tp)
    everybody = {*four_ranks.OURS, "owner_bfloat16_model", "owner_unpublished", "owner_unpublished_standard_form"}
    assert everybody <= ranks[0].keys()
    assert ({"torch_replicated", "torch_dtensor"} <= ranks[0].keys()) == (tp == 1)
    for rank in ranks:
        for name, cosines in rank.items():
            moved = [cosine for cosine in cosines if cosine is not None]
            assert min(moved) > 0.9, (name, cosines)
            if tp == 1:  # over TP, everybody has a block of what others own
                assert (len(moved) < len(cosines)) == ("unpublished" in name), name


def test_the_bare_products_are_those_of_all_matrices_and_nothing_else() -> None:
    shapes = four_ranks.Matrices.of_layers(2, 16).shapes
    products = four_ranks.BareProducts(shapes, Grid.alone(), four_ranks.torch.float32)
    assert [tuple(x.shape) for x, *_ in products.mine] == [tuple(sorted(shape)) for shape in shapes]
    assert products.heaviest_over_mean == 1.0


def test_a_race_has_a_ratio_and_the_predicted_bytes_for_everybody() -> None:
    found = launch.run(race_workers.small_race, (2,), dp=2)[0]
    assert found["matrices"] == {"64x64": 4, "256x64": 1, "64x256": 1}
    entrants, elements = found["entrants"], 6 * 64 * 64 * 2
    assert all(row["ratio"]["count"] == 2 and row["ratio"]["median"] > 0 for row in entrants.values())
    assert entrants["owner"]["sent_bytes"] == 4 * elements / 2  # a rank sends its half
    assert entrants["owner_updates"]["sent_bytes"] == entrants["owner_bfloat16_model"]["sent_bytes"] == elements
    assert entrants["gather_all"]["sent_bytes"] == (2 + 4) * elements / 2  # momentum in bfloat16, too
    assert entrants["owner_unpublished"]["sent_bytes"] == entrants["torch_replicated"]["sent_bytes"] == 0


def test_a_race_can_do_without_the_matrix_unit() -> None:
    without = launch.run(race_workers.small_race, (1, False), dp=2)[0]
    assert without["matrix_unit"] is False
    assert without["entrants"].keys() == launch.run(race_workers.small_race, (1,), dp=2)[0]["entrants"].keys()


@pytest.mark.parametrize("matrix_unit", [True, False])
def test_training_steps_are_compared_with_zero1_in_bytes_and_time(matrix_unit: bool) -> None:
    rows = launch.run(race_workers.small_training, (matrix_unit,), dp=2)[0]
    assert [row["tokens"] for row in rows] == [96, 192]
    for row in rows:
        assert row["owner"]["bytes_ratio"] == pytest.approx(1, abs=1e-3)
        assert row["owner_updates"]["bytes_ratio"] < 1 < row["gather_all"]["bytes_ratio"]


# ---- Others -----------------------------------------------------------------------------------------------


def test_who_is_not_here_is_told_with_the_remedy(tmp_path: Path) -> None:
    if any(found["here"] for found in peers.find(None).values()):
        pytest.skip("other implementations are installed here")
    for name, found in peers.find(str(tmp_path)).items():
        assert not found["here"]
        assert f"clone github.com/{peers.PEERS[name].repository} into a folder" in found["remedy"]


def test_who_is_here_is_known_by_the_commit_of_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "dion"
    (clone / "dion").mkdir(parents=True)
    (clone / "dion" / "__init__.py").touch()
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(clone)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setattr("sys.path", [])
    found = peers.find(str(tmp_path))["dion"]
    assert found == {"here": True, "repository": "microsoft/dion", "version": f"commit {head}"}


# ---- The table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_unit", [False, True])
def test_the_table_has_a_line_for_everybody(has_unit: bool) -> None:
    ratio = {"median": 1.25, "quartiles": [1.2, 1.3], "count": 3}
    race = {
        "dtype": "float32",
        "fast_bfloat16": False,
        "floor_milliseconds": 190.4,
        "entrants": {"owner": {"ratio": ratio, "sent_bytes": 37.7e6}},
    }
    found = {
        "race": {"4x1": race},
        "without_unit": race if has_unit else None,
        "training": {"4x1": [{"tokens": 1024, "owner": {"bytes_ratio": 1.0, "ratio": ratio}}]},
        "training_without_unit": None,
    }
    lines = step_race.table(found).splitlines()
    assert lines[1].split() == ["owner", "1.25", "(1.20", "to", "1.30)", "37.70", "MB"]
    assert lines[2].startswith("  This CPU has no fast bfloat16")
    assert sum(line.startswith("4x1 without the matrix unit: one step") for line in lines) == has_unit
    assert lines[-1].split() == ["owner", "1,024", "tokens", "1.25", "(1.20", "to", "1.30)", "bytes", "1.0000"]


# ---- What the page says of the stored race ----------------------------------------------------------------


def test_the_page_prints_the_stored_race() -> None:
    cell = stored_pages.cell_with("16_owner", "tables.lines")
    assert cell.printed.splitlines() == tables.lines(results.load("step"))


def test_of_what_also_ran_compiled_the_faster_counts() -> None:
    rows = {"dion_replicated": 3.0, "dion_compiled_replicated": 2.0, "owner": 4.0}
    race = {"entrants": {name: {"ratio": {"median": median}} for name, median in rows.items()}}
    assert tables.medians(race) == {"owner": 4.0, "dion": 2.0}


@pytest.mark.parametrize("has_unit", [False, True])
def test_a_cpu_with_a_matrix_unit_is_timed_without_it_too(has_unit: bool) -> None:
    stored: dict[str, Any] = copy.deepcopy(results.load("step"))
    stored["without_unit"] = stored["race"]["4x1"] if has_unit else None
    stored["training_without_unit"] = stored["training"]["4x1"] if has_unit else None
    assert list(tables.races(stored)) == ["4 x 1", "2 x 2", "1 x 4"] + ["4 x 1, no unit"] * has_unit
    printed = tables.lines(stored)
    assert max(map(len, printed)) <= 100
    assert sum(line.startswith("  4 x 1, no unit") for line in printed) == 3 * has_unit


def test_what_the_page_says_of_the_race() -> None:
    stored = results.load("step")
    assert stored["race"]["4x1"]["matrices"] == {"512x512": 16, "2048x512": 4, "512x2048": 4}
    by_grid = tables.races(stored)
    assert all(min(times, key=times.__getitem__) == "owner" for times in by_grid.values())
    apart = [by_grid[grid]["gather all, bucketed"] / by_grid[grid]["owner"] for grid in ("4 x 1", "2 x 2", "1 x 4")]
    assert 1.1 < apart[0] < 1.3 < 1.8 < apart[1] < 2.0 < 3.5 < apart[2] < 4  # a sixth, not twice, nearly four times
    assert by_grid["4 x 1"]["gather cut"] < 1.05 * by_grid["4 x 1"]["owner"]
    assert stored["without_unit"] is None, "the page has no word on a CPU with a matrix unit"


def test_what_the_page_says_of_whole_training_steps() -> None:
    stored = results.load("step")
    ways: dict[str, list[dict[str, float]]] = {}
    for grid, _, times in tables.training_steps(stored):
        ways.setdefault(grid, []).append(times)
    assert [row["tokens"] for row in stored["training"]["4x1"]] == [256, 1024, 4096]
    for rows in ways.values():
        for title in tables.TRAINED:
            assert sorted((times[title] for times in rows), reverse=True) == [times[title] for times in rows]
        assert all(times["gather all, bucketed"] > times["owner"] for times in rows)
        assert all(abs(times["owner, sends updates"] / times["owner"] - 1) < 0.02 for times in rows)
    assert 1.05 < ways["4 x 1"][-1]["owner"] < 1.07 < 1.24 < ways["4 x 1"][-1]["gather all, bucketed"] < 1.26
