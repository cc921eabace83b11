"""Checkpoints: any grid loads what any other has saved, to the bit; what is damaged or foreign is refused."""

from __future__ import annotations

import json
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_workers as work
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers_math import message
from mesh_cases import Net
from torch import nn

from distmuon import MuonW, launch
from distmuon.extras.checkpoint.files import CheckpointError
from distmuon.extras.checkpoint.manifest import digest
from distmuon.extras.checkpoint.save_and_load import async_save, load, save, weights

GRIDS = [(4, 2), (2, 2), (2, 4), (8, 1), (1, 1), (3, 2)]

# ---- From grid to grid ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zero1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Where each grid has saved, and where the one process that was never stopped ended."""
    folder = tmp_path_factory.mktemp("zero1")
    ends = {}
    for dp, tp in [(4, 2), (1, 1), (3, 2)]:
        ends[dp, tp] = launch.run(work.save_zero1, (str(folder / f"{dp}x{tp}"),), dp=dp, tp=tp)[0]
    return {"folder": folder, "expected": ends[1, 1]}


@pytest.mark.parametrize("onto", GRIDS)
def test_what_four_by_two_saves_any_grid_loads_and_goes_on_to_the_bit(
    zero1: dict[str, Any], onto: tuple[int, int]
) -> None:
    arguments = (str(zero1["folder"] / "4x2"), zero1["expected"])
    for rank in launch.run(work.load_zero1, arguments, dp=onto[0], tp=onto[1]):
        assert rank == {"differ": [], "notes": work.NOTES, "lr": 0.03, "steps": work.BEFORE}


@pytest.mark.parametrize("start", [(1, 1), (3, 2)])
def test_and_back(zero1: dict[str, Any], start: tuple[int, int]) -> None:
    folder = zero1["folder"] / f"{start[0]}x{start[1]}"
    for rank in launch.run(work.load_zero1, (str(folder), zero1["expected"]), dp=4, tp=2):
        assert rank["differ"] == []


def test_masters_of_a_bf16_model_are_saved_and_strategies_may_change(tmp_path: Path) -> None:
    ends = launch.run(work.save_zero1, (str(tmp_path / "one"), True))[0]
    launch.run(work.save_zero1, (str(tmp_path / "two"), True, "owner"), dp=2, tp=2)
    for folder, dp, tp, strategy in (("two", 4, 1, "gather_all"), ("one", 2, 2, "owner")):
        for rank in launch.run(work.load_zero1, (str(tmp_path / folder), ends, True, strategy), dp=dp, tp=tp):
            assert rank["differ"] == []


MESHES = [("fsdp", 2), ("fsdp", 3), ("hybrid", 4), ("tp", 4), ("experts", 4), ("plain", 1)]


@pytest.fixture(scope="module")
def muonw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("muonw")
    for wrap, ranks in MESHES:
        launch.run(work.save_muonw, (wrap, str(folder / f"{wrap}{ranks}")), dp=ranks)
    return {"folder": folder, "expected": launch.run(work.never_stopped)[0]}


@pytest.mark.parametrize(("wrap", "ranks"), MESHES)
def test_muonw_goes_on_to_the_bit_on_any_mesh(muonw: dict[str, Any], wrap: str, ranks: int) -> None:
    folders = [str(muonw["folder"] / saved) for saved in ("tp4", "fsdp3", "plain1")]
    for rank in launch.run(work.load_muonw, (wrap, folders, muonw["expected"]), dp=ranks):
        assert rank == {folder: {"differ": [], "notes": work.NOTES} for folder in folders}


def test_weights_come_out_whole_whoever_saved_them(muonw: dict[str, Any], zero1: dict[str, Any]) -> None:
    expected = launch.run(work.never_stopped, (work.BEFORE,))[0]
    for saved in ("plain1", "fsdp2", "fsdp3", "hybrid4", "tp4"):
        model = Net()
        model.load_state_dict(weights(muonw["folder"] / saved))
        assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters()), saved
    one, *others = (weights(zero1["folder"] / saved) for saved in ("1x1", "4x2", "3x2"))
    for other in others:
        assert other.keys() == one.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_rank_takes_the_sha256_of_its_own_files(tmp_path: Path) -> None:
    found = launch.run(work.hashed, (str(tmp_path / "saved"),), dp=3)
    assert found == [[f"__{rank}_0.distcp"] for rank in range(3)]


def test_damage_that_one_rank_sees_stops_all(muonw: dict[str, Any]) -> None:
    (said,) = set(launch.run(work.damaged_for_one, (str(muonw["folder"] / "fsdp2"),), dp=2))
    assert "is damaged: it is not what its sha256 says" in said


# ---- What is not to be believed ---------------------------------------------------------------------------


def change(folder: Path, how: Callable[[dict[str, Any]], Any], sign: bool = True) -> None:
    """Edit the manifest as somebody would who knows how it is signed."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("sha256")
    how(manifest)
    manifest["sha256"] = digest(manifest) if sign else "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))


def flip(file: Path, share: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(share * (len(data) - 1))] ^= 1
    file.write_bytes(data)


def the_file(folder: Path) -> Path:
    (found,) = folder.glob("*.distcp")
    return found


def as_torch_saves(folder: Path) -> None:
    shutil.rmtree(folder)
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=folder, no_dist=True)


def rename_parameter(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["model/other"] = manifest["tensors"].pop("model/0.weight")


def bias(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["tensors"]["model/0.bias"]


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


def replace_by_nothing(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "is no folder"),
    "a file in its place": (replace_by_file, "is no folder"),
    "an empty folder": (replace_by_nothing, "has no manifest.json"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
    "torch's own": (as_torch_saves, "has no manifest.json"),
    "an empty manifest": (lambda f: (f / "manifest.json").write_text(""), "is damaged"),
    "a truncated manifest": (lambda f: (f / "manifest.json").write_text('{"format": '), "is damaged"),
    "a manifest that is a list": (lambda f: (f / "manifest.json").write_text("[]"), "is damaged"),
    "an unsigned manifest": (lambda f: (f / "manifest.json").write_text("{}"), "is damaged"),
    "a manifest of bytes": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), "is damaged"),
    "a wrong signature": (lambda f: change(f, lambda m: None, sign=False), "is damaged"),
    "a flipped bit in the manifest": (lambda f: flip(f / "manifest.json", 0.4), "is damaged"),
    "a later format": (lambda f: change(f, lambda m: m.update(format="distmuon checkpoint 3")), "has the format"),
    "a missing file": (lambda f: the_file(f).unlink(), "is missing"),
    "a truncated file": (lambda f: the_file(f).write_bytes(the_file(f).read_bytes()[:-7]), "bytes, not"),
    "a longer file": (lambda f: the_file(f).write_bytes(the_file(f).read_bytes() + b"x"), "bytes, not"),
    "an empty file": (lambda f: the_file(f).write_bytes(b""), "bytes, not"),
    "a bit at the start": (lambda f: flip(the_file(f), 0.0), "is damaged"),
    "a bit in the middle": (lambda f: flip(the_file(f), 0.5), "is damaged"),
    "a bit at the end": (lambda f: flip(the_file(f), 1.0), "is damaged"),
    "zeros for a file": (lambda f: the_file(f).write_bytes(bytes(the_file(f).stat().st_size)), "is damaged"),
    "a file elsewhere": (lambda f: change(f, lambda m: m["files"].update({"../x": [1, "0"]})), "outside its folder"),
    "a tensor less": (lambda f: change(f, lambda m: m["tensors"].pop("model/0.weight")), "lacks 'model/0.weight'"),
    "a tensor renamed": (lambda f: change(f, rename_parameter), "lacks 'model/0.weight'"),
    "another shape": (lambda f: change(f, lambda m: bias(m).update(shape=[7])), "do not fill it exactly"),
    "another dtype": (lambda f: change(f, lambda m: bias(m).update(dtype="int8")), "is int8 [6]"),
    "a group less": (lambda f: change(f, lambda m: m["notes"]["groups"].pop()), "a state of no parameter"),
    "no groups": (lambda f: change(f, lambda m: m["notes"]["groups"].clear()), "a state of no parameter"),
    "another algorithm": (lambda f: change(f, lambda m: m["notes"]["groups"][0].update(algorithm="adamw")), "trained"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_nothing_has_changed(tmp_path: Path, kind: str) -> None:
    harm, words = DAMAGE[kind]
    save(tmp_path / "saved", *work.small())
    harm(tmp_path / "saved")
    model, optimizer = work.small()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    before = [t.clone() for t in everything(model, optimizer)]
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "saved", model, optimizer)
    assert words in str(error.value)
    message(error)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*model.state_dict().values(), *(t for state in optimizer.state.values() for t in state.values())]


def test_another_training_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "saved", *work.small())
    other = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    with pytest.raises(CheckpointError, match=r"'model/1\.weight' is float32 \[3, 6\] .* and float32 \[5, 6\] here"):
        load(tmp_path / "saved", other, MuonW(other))
    fewer = nn.Sequential(nn.Linear(4, 6))
    with pytest.raises(CheckpointError, match=r"has 'model/1\.weight', which the model has not"):
        load(tmp_path / "saved", fewer, MuonW(fewer))


def test_it_goes_on_from_where_it_was(tmp_path: Path) -> None:
    model, optimizer = work.small()
    optimizer.param_groups[1]["betas"] = (0.5, 0.6)
    save(tmp_path / "saved", model, optimizer, {"step": 2})
    other, resumed = work.small()
    resumed.param_groups[1]["lr"] = 7.0
    assert load(tmp_path / "saved", other, resumed) == {"step": 2}
    assert resumed.param_groups[1]["betas"] == (0.5, 0.6)
    assert resumed.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"]
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), everything(other, resumed), strict=True))


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path) -> None:
    save(tmp_path / "saved", *work.small())
    with pytest.raises(CheckpointError, match="exists already"):
        save(tmp_path / "saved", *work.small())
    model, optimizer = work.small()
    optimizer.param_groups[0]["name"] = object()
    with pytest.raises(CheckpointError, match="the option name is"):
        save(tmp_path / "other", model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(("where", "background"), [("write_data", 0), ("finish", 0), ("publish", 0), ("finish", 1)])
def test_who_is_killed_while_saving_leaves_the_last_checkpoint_and_no_half_one(
    tmp_path: Path, where: str, background: int
) -> None:
    save(tmp_path / "first", *work.small())
    with pytest.raises(launch.WorldError):
        launch.run(work.save_and_die, (str(tmp_path / "second"), where, bool(background)), dp=2)
    assert not (tmp_path / "second").exists()
    assert list(tmp_path.glob(".unfinished-second-*"))
    load(tmp_path / "first", *work.small())
    save(tmp_path / "second", *work.small())
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


# ---- In the background ------------------------------------------------------------------------------------


def test_what_is_saved_in_the_background_is_what_was_there_when_it_began(zero1: dict[str, Any], tmp_path: Path) -> None:
    arguments = (str(tmp_path / "saved"), False, "owner", True)
    launch.run(work.save_zero1, arguments, dp=2, tp=2)
    for rank in launch.run(work.load_zero1, (str(tmp_path / "saved"), zero1["expected"]), dp=3, tp=2):
        assert rank["differ"] == []


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
