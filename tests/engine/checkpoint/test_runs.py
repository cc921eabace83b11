"""A run's folder: the newest checkpoint that can be believed, and no more of them than wanted."""

from __future__ import annotations

import shutil
from pathlib import Path

import checkpoint_workers as work
import pytest
import torch

from distmuon import launch
from distmuon.checkpoint import CheckpointError, at_step, keep_newest, load_newest, save, saved_steps


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (9, 10, 100):
        save(at_step(tmp_path, step), *work.small(), {"step": step})
    return tmp_path


def test_checkpoints_are_found_by_number_and_nothing_else_is_taken_for_one(run: Path) -> None:
    for other in ("step-", "step-7x", ".unfinished-step-000200-abcdefgh", "refused-step-000300"):
        (run / other).mkdir()
    assert saved_steps(run) == [100, 10, 9]
    assert saved_steps(run / "missing") == []


def test_the_newest_is_loaded_and_a_run_without_any_begins(run: Path, tmp_path: Path) -> None:
    assert load_newest(run, *work.small()) == (100, {"step": 100}, [])
    assert load_newest(tmp_path / "new", *work.small()) == (0, {}, [])


def test_refused_ones_are_set_aside_once_an_older_one_is_loaded(run: Path) -> None:
    for _ in range(2):
        (at_step(run, 100) / "manifest.json").unlink()
        shutil.rmtree(at_step(run, 10))
        at_step(run, 10).mkdir()
        loaded = load_newest(run, *work.small())
        assert (loaded.step, len(loaded.refused)) == (9, 2)
        assert "step-000100 has no manifest.json" in loaded.refused[0]
        for step in (10, 100):
            save(at_step(run, step), *work.small())
    names = {path.name for path in run.glob("refused-*")}
    assert names == {f"refused-step-{step}{again}" for step in ("000010", "000100") for again in ("", "-2")}


def test_where_all_are_refused_nothing_moves(run: Path) -> None:
    for step in (9, 10, 100):
        (at_step(run, step) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000100 has no manifest\.json.*, and 2 older ones likewise\.$"):
        load_newest(run, *work.small())
    assert saved_steps(run) == [100, 10, 9]


def test_the_oldest_are_removed_and_what_killed_ones_have_left_but_no_save_under_way(run: Path) -> None:
    at_step(run, 9).rename(run / ".removed-000009")
    (run / ".unfinished-step-000050-abcdefgh").mkdir()
    (run / ".unfinished-step-000101-abcdefgh").mkdir()
    keep_newest(run, 1)
    assert sorted(path.name for path in run.iterdir()) == [".unfinished-step-000101-abcdefgh", "step-000100"]


def test_after_an_evaluation_a_model_of_fsdp2_is_taken_as_it_is_trained(tmp_path: Path) -> None:
    """Its outermost module then holds whole parameters, which are not those that are trained."""
    for trained, same in launch.run(work.make_and_save_after_an_evaluation, (str(tmp_path / "saved"),), dp=2):
        assert trained
        assert same


def test_the_newest_is_the_same_on_all_ranks(run: Path) -> None:
    assert launch.run(work.newest, (str(run),), dp=2) == [(100, 2.0)] * 2
    assert torch.get_default_dtype() == torch.float32
