"""Checkpoints: any grid loads what any other has saved, to the bit; what is damaged or foreign is refused."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint_workers as work
import pytest
import torch
from mesh_cases import Net
from torch import nn

from distmuon import MuonW, launch
from distmuon.extras.checkpoint.files import CheckpointError
from distmuon.extras.checkpoint.save_and_load import async_save, load, save, weights

# ---- From grid to grid ------------------------------------------------------------------------------------

SAVED: dict[str, dict[str, Any]] = {  # name of a checkpoint -> how it is saved
    "1x1": {},
    "1x1, bf16": {"narrow": True},
    "3x2": {},
    "4x2": {},
    "2x2, in the background": {"strategy": "owner", "background": True},
    "2x2, bf16": {"strategy": "owner", "narrow": True},
}
VISITS: dict[tuple[int, int], dict[str, str]] = {  # (D, T) -> what is loaded there, with which strategy
    (3, 2): {"1x1": "gather_all"},
    (4, 2): {"1x1": "gather_all", "3x2": "gather_all", "4x2": "gather_all"},
    (2, 2): {"4x2": "gather_all", "1x1, bf16": "owner"},
    (2, 4): {"4x2": "gather_all", "2x2, in the background": "gather_all"},
    (8, 1): {"4x2": "gather_all", "2x2, bf16": "gather_all"},
    (1, 1): {"4x2": "gather_all", "2x2, in the background": "owner"},
}


def visit(*acts: Callable[[launch.World], Any], dp: int, tp: int = 1) -> list[tuple[Any, ...]]:
    """Let one world do all this; return what every rank found, act by act."""
    return list(zip(*launch.run(work.visit, (acts,), dp=dp, tp=tp), strict=True))


@pytest.fixture(scope="module")
def zero1(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[int, int], list[tuple[Any, ...]]]]:
    """The folder in which every grid has saved first, and what each has found where it went on from others."""
    folder, found = tmp_path_factory.mktemp("zero1"), {}

    def saves(grid: str) -> list[Callable[[launch.World], Any]]:
        names = [name for name in SAVED if name.startswith(grid)]
        return [partial(work.save_zero1, folder=str(folder / name), **SAVED[name]) for name in names]

    (full,), (narrow,) = visit(*saves("1x1"), dp=1)
    for (dp, tp), loads in VISITS.items():
        acts = saves(f"{dp}x{tp}") if dp > 1 else []
        for name, strategy in loads.items():
            expected = {"narrow": True, "expected": narrow} if "bf16" in name else {"expected": full}
            acts.append(partial(work.load_zero1, folder=str(folder / name), strategy=strategy, **expected))
        found[dp, tp] = visit(*acts, dp=dp, tp=tp)[-len(loads) :]
    return folder, found


@pytest.mark.parametrize("grid", VISITS)
def test_what_a_grid_saves_any_other_loads_and_goes_on_to_the_bit(zero1: Any, grid: tuple[int, int]) -> None:
    """Also from what was saved in the background while training went on, with masters of bf16, another strategy."""
    for ranks in zero1[1][grid]:
        for rank in ranks:
            assert rank == {"differ": [], "notes": work.NOTES, "lr": 0.03, "steps": work.BEFORE}


@pytest.fixture(scope="module")
def muonw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same of MuonW on meshes; and what else two ranks of FSDP2 have found."""
    folder = tmp_path_factory.mktemp("muonw")
    before = partial(work.never_stopped, steps=work.BEFORE)

    def save_by(wrap: str, ranks: int) -> Callable[[launch.World], Any]:
        return partial(work.save_muonw, wrap=wrap, folder=str(folder / f"{wrap}{ranks}"))

    def loads(wrap: str, *names: str) -> list[Callable[[launch.World], Any]]:
        return [partial(work.load_muonw, wrap=wrap, folder=str(folder / name), expected=end) for name in names]

    _, (end,), (saved,) = visit(save_by("plain", 1), work.never_stopped, before, dp=1)
    loaded = visit(save_by("fsdp", 3), *loads("fsdp", "plain1"), dp=3)[1:]
    others = [load for wrap in ("hybrid", "tp", "experts") for load in loads(wrap, "tp4", "fsdp3", "plain1")]
    loaded += visit(save_by("tp", 4), save_by("hybrid", 4), *others, dp=4)[2:]
    loaded += visit(*loads("plain", "tp4", "fsdp3"), dp=1)
    _, damaged, hashed, evaluated, *last = visit(
        save_by("fsdp", 2),
        partial(work.damaged_for_one, folder=str(folder / "fsdp2")),
        partial(work.hashed, folder=str(folder / "hashed")),
        partial(work.make_and_save_after_an_evaluation, folder=str(folder / "evaluated")),
        *loads("fsdp", "tp4", "fsdp3", "plain1"),
        dp=2,
    )
    found = {"folder": folder, "saved": saved, "loaded": loaded + last}
    return found | {"damaged": damaged, "hashed": hashed, "evaluated": evaluated}


def test_muonw_goes_on_to_the_bit_on_any_mesh(muonw: dict[str, Any]) -> None:
    assert len(muonw["loaded"]) == 1 + 9 + 2 + 3
    for ranks in muonw["loaded"]:
        for rank in ranks:
            assert rank == {"differ": [], "notes": work.NOTES}


def test_weights_come_out_whole_whoever_saved_them(muonw: dict[str, Any], zero1: Any) -> None:
    for name in ("plain1", "fsdp2", "fsdp3", "hybrid4", "tp4"):
        model = Net()
        model.load_state_dict(weights(muonw["folder"] / name))
        assert all(torch.equal(p, muonw["saved"][key]) for key, p in model.named_parameters()), name
    one, *others = (weights(zero1[0] / name) for name in ("1x1", "4x2", "3x2"))
    for other in others:
        assert other.keys() == one.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_after_an_evaluation_a_model_of_fsdp2_is_taken_as_it_is_trained(muonw: dict[str, Any]) -> None:
    """Its outermost module then holds whole parameters, which are not those that are trained."""
    for trained, same in muonw["evaluated"]:
        assert trained
        assert same


def test_every_rank_takes_the_sha256_of_its_own_files(muonw: dict[str, Any]) -> None:
    assert list(muonw["hashed"]) == [["__0_0.distcp"], ["__1_0.distcp"]]


def test_damage_that_one_rank_sees_stops_all(muonw: dict[str, Any]) -> None:
    (said,) = set(muonw["damaged"])
    assert "is damaged: it is not what its sha256 says" in said


# ---- What is not done -------------------------------------------------------------------------------------


def test_another_training_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "saved", *work.small())
    other = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    with pytest.raises(CheckpointError, match=r"'model/1\.weight' is float32 \[3, 6\] .* and float32 \[5, 6\] here"):
        load(tmp_path / "saved", other, MuonW(other))
    fewer = nn.Sequential(nn.Linear(4, 6))
    with pytest.raises(CheckpointError, match=r"has 'model/1\.weight', which the model has not"):
        load(tmp_path / "saved", fewer, MuonW(fewer))


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path) -> None:
    save(tmp_path / "saved", *work.small())
    with pytest.raises(CheckpointError, match="exists already"):
        save(tmp_path / "saved", *work.small())
    model, optimizer = work.small()
    optimizer.param_groups[0]["name"] = object()
    with pytest.raises(CheckpointError, match="the option name is"):
        save(tmp_path / "other", model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_who_is_killed_while_saving_leaves_the_last_checkpoint_and_no_half_one(tmp_path: Path) -> None:
    """At other moments, and in the background: chapter 18's drills."""
    save(tmp_path / "first", *work.small())
    with pytest.raises(launch.WorldError):
        launch.run(work.save_and_die, (str(tmp_path / "second"),), dp=2)
    assert not (tmp_path / "second").exists()
    assert list(tmp_path.glob(".unfinished-second-*"))
    load(tmp_path / "first", *work.small())
    save(tmp_path / "second", *work.small())
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


# ---- In the background ------------------------------------------------------------------------------------


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    with work.held_back():
        first = async_save(tmp_path / "first", *work.small())
        second = threading.Thread(target=save, args=(tmp_path / "second", *work.small()))
        second.start()
        second.join(0.3)  # long enough to begin, were it not for the first
        assert second.is_alive()
        assert not list(tmp_path.glob(".unfinished-second-*"))
    second.join()
    assert first.done()
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


def test_what_fails_in_the_background_is_said_on_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    for said in launch.run(work.save_over, (str(tmp_path / "saved"),), dp=2):
        assert all("not empty" in words for words in said), said
        assert len(said) == 2
        assert said[1].startswith(f"{tmp_path / 'saved'} was not saved: OSError")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("fits", [40, 10_000])  # bytes: within the first tensor, or, as a full disk mostly, after some
@pytest.mark.filterwarnings("ignore:.* was not saved")
def test_of_a_disk_that_is_full_the_reason_is_said_and_not_what_follows_from_it(tmp_path: Path, fits: int) -> None:
    model = nn.Linear(8, 640)
    ways: tuple[Callable[..., Any], ...] = (save, lambda *given: async_save(*given).result())
    for way in ways:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fits, before[1]))
        try:
            with pytest.raises(CheckpointError, match=r"saved was not saved: OSError: \[Errno 27\] File too large"):
                way(tmp_path / "saved", model, MuonW(model))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.iterdir()) == []


def test_notes_that_json_does_not_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="set is not JSON serializable"):
        async_save(tmp_path / "saved", *work.small(), {"seen": {1, 2}})
    assert list(tmp_path.iterdir()) == []
