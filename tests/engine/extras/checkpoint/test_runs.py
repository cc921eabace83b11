"""A run's folder: the newest checkpoint that can be believed, and no more of them than wanted."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_workers as work
import pytest
import torch
from helpers_math import message
from torch import nn

from distmuon import launch
from distmuon.checkpoint import (
    CheckpointError,
    async_save,
    at_step,
    claim,
    load,
    load_newest,
    notes,
    prune,
    save,
    saved_steps,
    weights,
)
from distmuon.extras.checkpoint.save_and_load import lock_of


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


def test_all_ranks_load_what_the_first_one_finds(run: Path) -> None:
    assert launch.run(work.newest, (str(run),), dp=2) == [(100, 2)] * 2


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
    prune(run, 1)
    assert sorted(path.name for path in run.iterdir()) == [".unfinished-step-000101-abcdefgh", "step-000100"]


# ---- Two processes in one folder --------------------------------------------------------------------------


def hold(what: str, path: str, held: Any) -> None:
    """Hold a lock in another process until that is killed."""
    with contextlib.ExitStack() as stack:
        if what == "run":
            stack.enter_context(claim(path))
        else:
            stack.callback(lock_of(Path(path)).release)
        held.set()
        time.sleep(1000)


@contextlib.contextmanager
def another(what: str, path: Path) -> Iterator[Any]:
    """Let another process hold the lock on a run, or on the name of a checkpoint."""
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=hold, args=(what, str(path), held))
    process.start()
    try:
        assert held.wait(120)
        yield process
    finally:
        process.kill()
        process.join()


def refusal_of_claim(run: Path) -> str:
    with pytest.raises(CheckpointError) as error, claim(run):
        raise AssertionError("claimed twice")
    return message(error)


def test_a_second_training_in_a_run_is_refused_until_the_first_ends_or_dies(tmp_path: Path) -> None:
    with another("run", tmp_path / "run") as process:
        words = refusal_of_claim(tmp_path / "run")
        assert f"run is in use by another training, process {process.pid} on " in words
        process.kill()
        process.join()
        with claim(tmp_path / "run"):
            assert f"process {os.getpid()} on" in refusal_of_claim(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    with claim(tmp_path / "run"):
        pass


@pytest.mark.parametrize("count", [None, -1, 1.5, "2", True])
def test_a_count_that_is_none_removes_nothing(tmp_path: Path, count: Any) -> None:
    for step in (1, 2):
        save(at_step(tmp_path, step), *work.small())
    with pytest.raises(ValueError, match=f"count is {count!r}; give a whole number, 0 or more") as error:
        prune(tmp_path, count)
    message(error)
    assert len([*tmp_path.iterdir()]) == 2
    with pytest.raises(ValueError, match=f"step is {count!r}; give a whole number, 0 or more"):
        at_step(tmp_path, count)


def test_a_model_that_is_none_is_refused_by_a_sentence(tmp_path: Path) -> None:
    for act in (save, load_newest):
        save(at_step(tmp_path, 1), *work.small()) if act is load_newest else None
        with pytest.raises(TypeError, match=r"the model is None \(NoneType\); give an nn.Module"):
            act(tmp_path if act is load_newest else at_step(tmp_path, 1), None)  # type: ignore[arg-type]


def test_a_second_saver_of_a_step_leaves_the_first_ones_files(tmp_path: Path) -> None:
    step = at_step(tmp_path, 7)
    (tmp_path / ".unfinished-step-000007-abcdefgh").mkdir()
    save(at_step(tmp_path, 8), *work.small())
    with another("step", step) as process:
        for act in (save, async_save):
            with pytest.raises(CheckpointError, match=f"is being saved by process {process.pid} on .* now; wait") as e:
                act(step, *work.small())
            message(e)
        prune(tmp_path, 1)
        assert (tmp_path / ".unfinished-step-000007-abcdefgh").is_dir()
        process.kill()
        process.join()
        assert (tmp_path / ".lock-step-000007").exists()
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000008"]
    save(step, *work.small())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000007", "step-000008"]


def test_a_save_that_fails_gives_the_name_free(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.zeros(1).expand(3))
    with pytest.raises(CheckpointError, match="expanded"):
        save(tmp_path / "saved", model)
    save(tmp_path / "saved", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="exists already"):
        save(tmp_path / "saved", nn.Linear(2, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


# ---- Where a run is ---------------------------------------------------------------------------------------


def test_home_is_where_a_shell_would_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save("~/run/step-000001", *work.small(), {"step": 1})
    async_save(at_step("~/run", 2), *work.small(), {"step": 2}).result()
    assert load("~/run/step-000001", *work.small()) == notes("~/run/step-000001") == {"step": 1}
    assert saved_steps("~/run") == [2, 1]
    assert load_newest("~/run", *work.small()).step == 2
    with claim("~/run"):
        prune("~/run", 1)
    assert saved_steps(tmp_path / "run") == [2]
    assert weights("~/run/step-000002").keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    for act in (saved_steps, weights, notes, lambda run: load(run, *work.small())):
        with pytest.raises(CheckpointError, match="write the path out") as error:
            act("~nobody-of-that-name/run")
        message(error)


def test_what_a_file_system_refuses_is_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"(FileExists|NotADirectory)Error: "):
        save(tmp_path / "file" / "saved", *work.small())
    for step in (1, 2):
        save(at_step(tmp_path, step), *work.small())
    real = os.open

    def broken(path: Any, *arguments: Any, **options: Any) -> int:
        if "step-000002" in str(path) and str(path).endswith("distcp"):
            raise OSError(5, "Input/output error")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", broken)
    loaded = load_newest(tmp_path, *work.small())
    assert (loaded.step, loaded.refused) == (1, ["OSError: [Errno 5] Input/output error."])
