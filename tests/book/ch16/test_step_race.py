"""Chapter 16's race: everybody makes Muon's step before anybody's time counts, and who is not here is named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import race_workers
import stored_pages

from distmuon import launch
from distmuon.optim.strategies.gather_all import GatherAll
from distmuon.optim.strategies.owner import OneOwner
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from muonbook import peers
from muonbook.ch16.race import four_ranks, step_race, tables
from muonbook.measure import results
from muonbook.measure.workload import SHAPES

FOLDER = os.environ.get("PEERS")


def test_a_folder_of_others_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS", "/nowhere")
    with pytest.raises(launch.UsageError, match="PEERS=/nowhere: there is no such folder; clone"):
        step_race.measure(quick=True)


# ---- Everybody --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_everybody_goes_where_the_polar_factor_points(dp: int, tp: int) -> None:
    here = [name for name, found in peers.find(FOLDER).items() if found["here"]]
    ranks = launch.run(race_workers.first_steps, (here, FOLDER), dp=dp, tp=tp)
    assert set(four_ranks.OURS) <= ranks[0].keys()
    assert ("torch_replicated" in ranks[0]) == (tp == 1)
    for rank in ranks:
        for name, cosines in rank.items():
            assert min(cosines) > 0.9, (name, cosines)


def test_the_bare_products_are_those_of_all_matrices_and_nothing_else() -> None:
    shapes = four_ranks.Matrices.of_layers(2, 16).shapes
    products = four_ranks.BareProducts(shapes, Grid.alone(), four_ranks.torch.float32)
    assert [tuple(x.shape) for x, *_ in products.mine] == [tuple(sorted(shape)) for shape in shapes]


def test_a_race_has_a_ratio_for_everybody() -> None:
    found = launch.run(four_ranks.race, (2, [], None, 1, 64), dp=2)[0]
    assert found["matrices"] == {"64x64": 4, "256x64": 1, "64x256": 1}
    assert found["baselines"].keys() == {*four_ranks.OURS, "torch_replicated"}
    assert all(row["ratio"]["count"] == 2 and row["ratio"]["median"] > 0 for row in found["baselines"].values())


def test_training_steps_are_compared_with_zero1() -> None:
    rows = launch.run(four_ranks.compare_training_steps, ((1, 2), 2, SHAPES["odd"]), dp=2)[0]
    assert [row["tokens"] for row in rows] == [96, 192]
    for row in rows:
        assert all(row[name]["ratio"]["median"] > 0 for name in tables.TRAINED.values())


def test_every_trainer_is_what_its_name_says() -> None:
    made: dict[str, Any] = {
        name: make(SHAPES["odd"], Grid.alone()).optimizers[0] for name, make in four_ranks.MAKE.items()
    }
    assert isinstance(made.pop("zero1"), Zero1AdamW)
    assert {name: (type(each.strategy), each.published) for name, each in made.items()} == {
        "gather_all": (GatherAll, "parameters"),
        "owner": (OneOwner, "parameters"),
        "owner_updates": (OneOwner, "updates"),
    }


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


# ---- What the page says of the stored race ----------------------------------------------------------------


def test_the_page_prints_the_stored_race() -> None:
    cell = stored_pages.cell_with("16_owner", "tables.lines")
    assert cell.printed.splitlines() == tables.lines(results.load("step"))


def test_a_cpu_without_fast_bfloat16_is_told_of() -> None:
    stored = results.load("step")
    assert not any("No fast bfloat16" in line for line in tables.lines(stored))
    stored["race"]["4x1"]["fast_bfloat16"] = False
    assert sum("No fast bfloat16" in line for line in tables.lines(stored)) == 1


def test_what_the_page_says_of_the_race() -> None:
    stored = results.load("step")
    assert stored["race"]["4x1"]["matrices"] == {"512x512": 16, "2048x512": 4, "512x2048": 4}
    by_grid = tables.races(stored)
    assert all(min(times, key=times.__getitem__) == "owner" for times in by_grid.values())
    apart = [by_grid[grid]["gather all, bucketed"] / by_grid[grid]["owner"] for grid in ("4 x 1", "2 x 2", "1 x 4")]
    assert 1.1 < apart[0] < 1.3 < 1.8 < apart[1] < 2.0 < 3.5 < apart[2] < 4  # a sixth, not twice, nearly four times
    assert by_grid["4 x 1"]["gather cut"] < 1.05 * by_grid["4 x 1"]["owner"]
    assert not any(race["matrix_unit"] for race in stored["race"].values()), "the page says that there is none"


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
