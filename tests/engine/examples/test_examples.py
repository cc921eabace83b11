"""The programs to start from: each runs, trains what its neighbours train, and differs from AdamW's by a few lines."""

from __future__ import annotations

import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import example_diffs
import example_workers as work
import pytest
import torch
from once import once
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from distmuon import checkpoint, launch

RANKS = {"one_device": 1, "ddp": 2, "fsdp2": 2, "fsdp2_tp": 4, "dp_tp": 4}  # examples that need torch alone
SETTINGS = {"STEPS": "6"}
Trained = Callable[[str], tuple[str, Path]]


def run(name: str, folder: Path, **settings: str) -> str:
    """Run an example on as many ranks as it is for; return what rank 0 prints."""
    if RANKS[name.removesuffix("_adamw")] == 1:
        return finish([sys.executable, str(work.EXAMPLES / f"{name}.py")], folder, **settings)
    given = (f"{name}.py", str(folder), SETTINGS | settings)
    return launch.run(work.play, given, dp=RANKS[name.removesuffix("_adamw")])[0]


def finish(command: Sequence[str], folder: Path, **settings: str) -> str:
    """Run a command in this folder; return what it prints."""
    done = subprocess.run(command, cwd=folder, env=os.environ | SETTINGS | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """Return what an example prints, and the folder in which it has saved; it runs once."""

    @once
    def of(name: str) -> tuple[str, Path]:
        folder = tmp_path_factory.mktemp(name)
        return run(name, folder), folder

    return of


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole weights that an example has saved, whatever has saved them."""
    if (folder / "checkpoint.pt").exists():
        return torch.load(folder / "checkpoint.pt")["model"]
    if (folder / "checkpoint" / "manifest.json").exists():
        return checkpoint.weights(folder / "checkpoint")
    dcp_to_torch_save(folder / "checkpoint", folder / "whole.pt")
    return torch.load(folder / "whole.pt")["model"]


@pytest.mark.parametrize("optimizer", ["", "_adamw"])
@pytest.mark.parametrize("name", RANKS)
def test_an_example_trains(name: str, optimizer: str, trained: Trained) -> None:
    printed, _ = trained(name + optimizer)
    assert re.fullmatch(r"loss \d\.\d{4}\n", printed)
    assert float(printed.split()[1]) < 4.4  # it begins at 4.6


@pytest.mark.parametrize("name", [name for name in RANKS if name != "one_device"])
def test_however_it_is_spread_it_is_the_training_of_one_process(name: str, trained: Trained) -> None:
    whole, spread = (weights_in(trained(each)[1]) for each in ("one_device", name))
    assert spread.keys() == whole.keys()
    begun = torch.cat([value.flatten() for value in weights_at_the_start().values()])
    one, many = (torch.cat([found[key].flatten() for key in whole]) for found in (whole, spread))
    # roundings of the momentum to bf16 flip here and there, and Newton–Schulz enlarges what is small
    assert (one - many).norm() < 0.05 * (one - begun).norm()


@once
def weights_at_the_start() -> dict[str, torch.Tensor]:
    return runpy.run_path(str(work.EXAMPLES / "task.py"))["make_model"]().state_dict()


@pytest.mark.parametrize("name", RANKS)
def test_it_differs_from_adamws_by_ten_lines_at_most(name: str) -> None:
    changed = [line for line in example_diffs.difference(name).splitlines() if line[:2] in ("+ ", "- ")]
    assert 0 < len(changed) <= 10


@pytest.mark.parametrize("optimizer", ["", "_adamw"])
def test_a_job_that_was_over_too_early_is_resumed_exactly(optimizer: str, trained: Trained, tmp_path: Path) -> None:
    name = f"fsdp2{optimizer}"
    run(name, tmp_path, STOP="3")
    printed, folder = trained(name)
    assert run(name, tmp_path) == printed
    resumed, whole = weights_in(tmp_path), weights_in(folder)
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)


def test_the_certificates_example_prints_two_that_pass(tmp_path: Path) -> None:
    printed = launch.run(work.play, ("certify_run.py", str(tmp_path), {}), dp=2)[0]
    assert printed.count("Verified: the sharded run is the single-process run.") == 2, printed
    assert printed.count("bitwise equal                       pass") == 4
    assert "FAIL" not in printed


def test_no_example_is_longer_than_sixty_lines() -> None:
    assert {file.name for file in work.EXAMPLES.glob("*.py") if len(file.read_text().splitlines()) > 60} == set()


# ---- In other people's frameworks -------------------------------------------------------------------------

PYTHON, TORCHRUN = [sys.executable], [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
BY_FSDP2 = ON_CPU | {
    "ACCELERATE_USE_FSDP": "true",  # what `accelerate launch --use_fsdp --fsdp_version 2` sets
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
FRAMEWORKS = [  # (package, example, how it is started, its arguments, environment)
    ("transformers", "hf_trainer", [*TORCHRUN, "2"], [], {}),
    ("accelerate", "accelerate_loop", PYTHON, [], ON_CPU),
    ("accelerate", "accelerate_loop", [*TORCHRUN, "2"], [], ON_CPU),
    ("accelerate", "accelerate_loop", [*TORCHRUN, "2"], [], BY_FSDP2),
    ("lightning", "lightning_module", PYTHON, ["ddp", "2"], {}),
    ("lightning", "lightning_module", PYTHON, ["model_parallel", "2"], {}),
    ("peft", "peft_lora", PYTHON, [], {"STEPS": "20"}),
    ("timm", "timm_vit", PYTHON, [], {"STEPS": "60"}),
]


@pytest.mark.parametrize(("package", "name", "start", "arguments", "environment"), FRAMEWORKS)
def test_an_example_trains_in_somebody_elses_framework(
    package: str, name: str, start: list[str], arguments: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip(package)
    command = [*start, str(work.EXAMPLES / f"{name}.py"), *arguments]
    (loss,) = re.findall(r"^loss (\d\.\d{4})$", finish(command, tmp_path, **environment), re.MULTILINE)
    assert float(loss) < math.log(10 if name == "timm_vit" else 256)  # that of a model that knows nothing


def test_trainer_resumes_exactly(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [*PYTHON, str(work.EXAMPLES / "hf_trainer.py")]
    finish(command, tmp_path)
    whole = final_weights(tmp_path)
    shutil.rmtree(tmp_path / "out" / "trainer" / "checkpoint-6")
    finish([*command, "--resume"], tmp_path)
    assert whole == final_weights(tmp_path)


def final_weights(folder: Path) -> bytes:
    return (folder / "out" / "trainer" / "checkpoint-6" / "model.safetensors").read_bytes()
