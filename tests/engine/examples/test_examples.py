"""The programs to start from: each runs, trains what its neighbours train, and differs from AdamW's by a few lines."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import example_diffs
import example_workers as work
import pytest
import torch
from example_workers import Performance
from once import once
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from distmuon import checkpoint, launch

RANKS = {"one_device": 1, "ddp": 2, "fsdp2": 2, "fsdp2_tp": 4, "dp_tp": 4}  # examples that need torch alone
SETTINGS = {"STEPS": "6"}
NAMES = [name + optimizer for name in RANKS for optimizer in ("", "_adamw")]
RESUMED = "fsdp2, stopped and resumed"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A folder with one for every example."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def perform(home: Path, ranks: int, *performances: Performance) -> dict[str, str]:
    """Play examples in one world; return what rank 0 prints, by the name of the folder."""
    for one in performances:
        (home / one.folder).mkdir(exist_ok=True)
    played = [one._replace(settings={**SETTINGS, **one.settings}) for one in performances]
    printed = launch.run(work.play, (str(home), played), dp=ranks)[0]
    return dict(zip([one.folder for one in performances], printed, strict=True))


def finish(name: str, home: Path, **settings: str) -> str:
    """Run an example by itself; return what it prints."""
    (home / name).mkdir()
    command, environment = [sys.executable, str(work.EXAMPLES / f"{name}.py")], os.environ | SETTINGS | settings
    done = subprocess.run(command, cwd=home / name, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@once
def trained(home: Path) -> dict[str, str]:
    """Return what every example that needs torch alone prints; what it saves is in a folder of its name."""
    found = {name: finish(name, home) for name in ("one_device", "one_device_adamw")}
    on = {
        ranks: [Performance(name, name) for name in NAMES if RANKS[name.removesuffix("_adamw")] == ranks]
        for ranks in (2, 4)
    }
    stopped = Performance("fsdp2", RESUMED, {"STOP": "3"}), Performance("fsdp2", RESUMED)
    found |= perform(home, 2, *on[2], *stopped, Performance("certify_run", "certify_run"))
    return found | perform(home, 4, *on[4])


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole weights that an example has saved, whatever has saved them."""
    if (folder / "checkpoint.pt").exists():
        return torch.load(folder / "checkpoint.pt")["model"]
    if (folder / "checkpoint" / "manifest.json").exists():
        return checkpoint.weights(folder / "checkpoint")
    dcp_to_torch_save(folder / "checkpoint", folder / "whole.pt")
    return torch.load(folder / "whole.pt")["model"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains(home: Path, name: str) -> None:
    assert re.fullmatch(r"loss \d\.\d{4}\n", trained(home)[name])
    assert float(trained(home)[name].split()[1]) < 4.4  # it begins at 4.6


@pytest.mark.parametrize("name", [name for name in RANKS if name != "one_device"])
def test_however_it_is_spread_it_is_the_training_of_one_process(home: Path, name: str) -> None:
    trained(home)
    whole, spread = (weights_in(home / each) for each in ("one_device", name))
    assert spread.keys() == whole.keys()
    start = runpy.run_path(str(work.EXAMPLES / "task.py"))["make_model"]().state_dict()
    begun, one, many = (torch.cat([found[key].flatten() for key in whole]) for found in (start, whole, spread))
    # roundings of the momentum to bf16 flip here and there, and Newton–Schulz enlarges what is small
    assert (one - many).norm() < 0.05 * (one - begun).norm()


@pytest.mark.parametrize("name", RANKS)
def test_it_differs_from_adamws_by_ten_lines_at_most(name: str) -> None:
    changed = [line for line in example_diffs.difference(name).splitlines() if line[:2] in ("+ ", "- ")]
    assert 0 < len(changed) <= 10


def test_a_job_that_was_over_too_early_is_resumed_exactly(home: Path) -> None:
    assert trained(home)[RESUMED] == trained(home)["fsdp2"]
    resumed, whole = weights_in(home / RESUMED), weights_in(home / "fsdp2")
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)


def test_the_certificates_example_prints_two_that_pass(home: Path) -> None:
    printed = trained(home)["certify_run"]
    assert printed.count("Verified: the sharded run is the single-process run.") == 2, printed
    assert printed.count("bitwise equal                       pass") == 4
    assert "FAIL" not in printed


def test_no_example_is_longer_than_sixty_lines() -> None:
    assert {file.name for file in work.EXAMPLES.glob("*.py") if len(file.read_text().splitlines()) > 60} == set()


# ---- In other people's frameworks -------------------------------------------------------------------------

ON_CPU = {"ACCELERATE_USE_CPU": "true"}
BY_FSDP2 = ON_CPU | {
    "ACCELERATE_USE_FSDP": "true",  # what `accelerate launch --use_fsdp --fsdp_version 2` sets
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
ON_TWO_RANKS = {  # package -> examples
    "transformers": [Performance("hf_trainer", "Trainer")],
    "accelerate": [
        Performance("accelerate_loop", "Accelerate", ON_CPU),
        Performance("accelerate_loop", "Accelerate, FSDP2", BY_FSDP2),
    ],
    "lightning": [
        Performance("lightning_module", "Lightning", arguments=("ddp", "2")),
        Performance("lightning_module", "Lightning, FSDP2", arguments=("model_parallel", "2")),
    ],
}


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the example needs {package}")


@once
def in_frameworks(home: Path) -> dict[str, str]:
    """Return what the examples print for which there is the package."""
    there = [examples for package, examples in ON_TWO_RANKS.items() if importlib.util.find_spec(package)]
    return perform(home, 2, *itertools.chain(*there))


def check_loss(printed: str, most: float) -> None:
    (loss,) = re.findall(r"^loss (\d\.\d{4})$", printed, re.MULTILINE)
    assert float(loss) < most


@pytest.mark.parametrize("package", ON_TWO_RANKS)
def test_an_example_trains_in_somebody_elses_framework(home: Path, package: str) -> None:
    require(package)
    for one in ON_TWO_RANKS[package]:
        check_loss(in_frameworks(home)[one.folder], math.log(256))  # that of a model that knows nothing


@pytest.mark.parametrize(
    ("package", "name", "steps", "most"), [("peft", "peft_lora", 20, 256), ("timm", "timm_vit", 60, 10)]
)
def test_an_example_for_one_process_trains(home: Path, package: str, name: str, steps: int, most: int) -> None:
    require(package)
    check_loss(finish(name, home, STEPS=str(steps)), math.log(most))


def test_trainer_resumes_exactly(home: Path) -> None:
    require("transformers")
    in_frameworks(home)
    weights = home / "Trainer" / "out" / "trainer" / "checkpoint-6" / "model.safetensors"
    whole = weights.read_bytes()
    shutil.rmtree(weights.parent)
    perform(home, 2, Performance("hf_trainer", "Trainer", arguments=["--resume"]))
    assert whole == weights.read_bytes()
