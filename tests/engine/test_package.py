"""The engine as others install it: a wheel with nothing of the book, imported where there is nothing else."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import distmuon

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENGINE = ROOT / "scripts" / "distmuon"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy: setuptools leaves its scraps beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    shutil.copytree(ROOT / "scripts", tree / "scripts", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tree / name)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", str(tree), *offline, "--wheel-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the unpacked wheel and nothing else."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=False, symlinks=True)
    zipfile.ZipFile(wheel).extractall(next(home.glob("lib/python*/site-packages")))
    return home / "bin" / "python"


@pytest.fixture
def with_torch(installed: Path) -> Iterator[Path]:
    """The same, with the packages of this environment: torch and what it brings."""
    site = next(installed.parents[1].glob("lib/python*/site-packages"))
    (site / "others.pth").write_text(str(Path(torch.__file__).parents[1]))
    yield installed
    (site / "others.pth").unlink()


def run(python: Path, *arguments: str, folder: Path | None = None) -> str:
    """Run a Python that ignores its surroundings; return what it prints."""
    done = subprocess.run([python, "-I", *arguments], capture_output=True, text=True, cwd=folder or python.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_wheel_holds_the_engine_with_its_types_and_the_kit_and_nothing_of_the_book(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packages = (ENGINE, ENGINE.with_name("muon_conformance"))
    ours = {path.relative_to(ENGINE.parent).as_posix() for package in packages for path in package.rglob("*.py")}
    assert held == ours | {"distmuon/py.typed", "distmuon/models/alice.txt"}
    assert wheel.name == f"distmuon-{distmuon.__version__}-py3-none-any.whl"


def test_it_asks_for_torch_and_numpy_and_says_which_python(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        said = file.read(name).decode()
    required = re.findall(r"^Requires-Dist: (.+)$", said, re.MULTILINE)
    assert sorted(required) == ["numpy", 'scikit-learn; extra == "data"', "torch>=2.11"]
    assert re.search(r"^Requires-Python: >=3\.11$", said, re.MULTILINE)
    assert re.search(r"^License-Expression: MIT$", said, re.MULTILINE)


def test_in_an_empty_environment_it_is_imported_at_once_and_starts_worlds_without_torch(installed: Path) -> None:
    program = """
import sys, time
began = time.perf_counter()
import distmuon
print(time.perf_counter() - began < 0.5, "torch" in sys.modules, distmuon.__version__, *dir(distmuon))
from distmuon import launch, plan
try:
    launch.run("distmuon.nothing:at_all")
except launch.UsageError as error:
    print(error)
try:
    distmuon.Muon
except ModuleNotFoundError as error:
    print(error)
"""
    first, refused, missing = run(installed, "-c", program).splitlines()
    names = [distmuon.__version__, *sorted([*distmuon.__all__, "__version__"])]
    assert first.split() == ["True", "False", *names]
    assert refused.startswith("worker is 'distmuon.nothing:at_all'; give a function")
    assert missing == "No module named 'torch'"


@pytest.fixture
def on_windows(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python takes this machine for one with Windows."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.platform = 'win32'\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ENGINE.parent}"}


ELSEWHERE = "distmuon runs on Linux, macOS, or WSL on Windows; start this in WSL.\n"


def test_windows_is_told_where_it_runs_instead(on_windows: dict[str, str]) -> None:
    program = "try:\n    import distmuon\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", program], env=on_windows, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, ELSEWHERE, "")


def test_a_worker_on_windows_ends_with_that_sentence_alone(on_windows: dict[str, str]) -> None:
    command = [sys.executable, str(ENGINE.parent / "10_dp_tp.py")]
    done = subprocess.run(command, env=on_windows, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {ELSEWHERE}")


def test_with_torch_every_public_name_is_there(with_torch: Path) -> None:
    program = """
import distmuon
from distmuon import launch, newton_schulz
import distmuon.launch, distmuon.optim.newton_schulz
assert launch is distmuon.launch and newton_schulz is distmuon.newton_schulz
from distmuon import *
print(all(globals()[name] is getattr(distmuon, name) for name in distmuon.__all__))
try:
    distmuon.typo
except AttributeError as error:
    print(error)
"""
    assert run(with_torch, "-c", program).splitlines() == ["True", "module 'distmuon' has no attribute 'typo'"]


def test_the_readmes_example_trains_with_the_installed_engine(with_torch: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(example, encoding="utf-8")
    first, last = ast.literal_eval(run(with_torch, "train.py", folder=tmp_path))
    assert last < 0.5 * first


def test_the_installed_engine_trains_on_two_ranks(with_torch: Path, tmp_path: Path) -> None:
    program = """
import torch
from torch import nn
from distmuon import DistributedMuon, Grid, launch, split_parameters

def train(world):
    torch.manual_seed(0)
    x, y = torch.randn(64, 16)[world.rank :: world.size], torch.arange(64)[world.rank :: world.size] % 4
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = DistributedMuon(split_parameters(model), Grid.of(world), lr=0.02)
    losses = []
    for _ in range(50):
        losses.append(nn.functional.cross_entropy(model(x), y))
        losses[-1].backward()
        optimizer.step()
    return losses[0].item(), losses[-1].item()

if __name__ == "__main__":
    print([list(of_all) for of_all in zip(*launch.run(train, dp=2))])
"""
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    first, last = ast.literal_eval(run(with_torch, "train.py", folder=tmp_path))
    assert len(first) == len(last) == 2
    assert max(last) < 0.5 * min(first)


def test_the_conformance_kit_is_one_command_of_the_installed_engine(with_torch: Path, tmp_path: Path) -> None:
    command = ["-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "muon_conformance", "-k", "golden"]
    printed = run(with_torch, *command, "--optimizer", "torch.optim:Muon", folder=tmp_path)
    assert "passed       golden numbers  " in printed


def test_type_checkers_see_the_types_of_every_public_name_and_no_other(installed: Path, tmp_path: Path) -> None:
    lines = ["import distmuon", *(f"reveal_type(distmuon.{name})" for name in distmuon.__all__), "distmuon.typo"]
    (tmp_path / "use.py").write_text("\n".join(lines))
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    options = ["--python-executable", str(installed), "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, "--config-file", "mypy.ini", "use.py"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    revealed = re.findall(r'Revealed type is "(.+)"', said)
    assert len(revealed) == len(distmuon.__all__), said
    assert "Any" not in revealed
    assert re.findall(r"error: (.+)", said) == ['Module has no attribute "typo"  [attr-defined]']


def test_what_type_checkers_are_told_is_what_is_imported() -> None:
    tree = ast.parse((ENGINE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    told = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    homes = {name: f"distmuon.{distmuon._HOMES[name]}" for name in distmuon._HOMES}  # type: ignore[attr-defined]
    assert told == homes | dict.fromkeys(("checkpoint", "launch", "metrics"), "distmuon")
    assert sorted(told) == sorted(distmuon.__all__)
