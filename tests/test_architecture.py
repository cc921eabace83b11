"""The rules of the house hold in the tree, and each of them bites on a small tree that breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import architecture
import pytest
from architecture import House

ROOT = Path(__file__).resolve().parents[1]
RULES = (
    architecture.upward,
    architecture.circles,
    architecture.unresolved,
    architecture.strangers,
)

SOUND = {  # a house in which every rule is kept
    "scripts/distmuon/__init__.py": "if TYPE_CHECKING:\n    from distmuon.optim.muon import Muon\n",
    "scripts/distmuon/launch/__init__.py": "from distmuon.launch.start import run\n",
    "scripts/distmuon/launch/start.py": "def run(): ...\n",
    "scripts/distmuon/sharding/grid.py": "from distmuon.launch import run\n\nclass Grid: ...\n",
    "scripts/distmuon/optim/__init__.py": "",
    "scripts/distmuon/optim/muon.py": "from distmuon.sharding.grid import Grid\n\nclass Muon: ...\n",
    "scripts/muonbook/notebook.py": "def start(): ...\n",
    "scripts/muonbook/figures/style.py": "CARD = COLOUR, _ = 1, 2\n",
    "scripts/muonbook/ch01/figure.py": "from muonbook.figures import style\n",
    "scripts/muonbook/ch01/job.py": "from distmuon.optim import muon\n\ndef train(): ...\n",
    "scripts/muonbook/ch02/figure.py": "from muonbook.figures.style import COLOUR\n",
    "scripts/01_why.py": 'JOB = "muonbook.ch01.job:train"\nif __name__ == "__main__": ...\n',
    "scripts/02_how.py": 'def main():\n    from muonbook.ch02 import figure\n\nif __name__ == "__main__": ...\n',
    "scripts/plan.py": 'def main():\n    from muonbook.planner import world\n\nif __name__ == "__main__": ...\n',
    "scripts/muonbook/planner/world.py": "",
    "scripts/tools/bench.py": "from muonbook.ch01 import figure\n\ndef main(): ...\n",
    "tests/book/ch01/test_one.py": "from muonbook.figures.style import CARD\n",
    "notebooks/01_why.ipynb": "from muonbook import notebook\nfrom muonbook.ch01.figure import style\n!python y",
    "notebooks/02_how.ipynb": "from muonbook.notebook import start",
}


@pytest.fixture(scope="module")
def ours() -> House:
    return House(ROOT)


def build(folder: Path, files: dict[str, str]) -> House:
    """Write the files of a house; a notebook is given by the source of its one cell."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cell = {"cell_type": "code", "source": text.splitlines(keepends=True)}
        path.write_text(json.dumps({"cells": [cell]}) if path.suffix == ".ipynb" else text)
    return House(folder)


def check(breaches: list[str]) -> None:
    assert not breaches, "\n" + "\n".join(breaches)


def test_arrows_run_downward_only_and_chapters_do_not_know_each_other(ours: House) -> None:
    check(architecture.upward(ours))


def test_there_is_no_circle_of_modules_or_rooms(ours: House) -> None:
    check(architecture.circles(ours))


def test_every_import_and_every_named_worker_exists(ours: House) -> None:
    check(architecture.unresolved(ours))


def test_what_one_room_alone_uses_lives_there(ours: House) -> None:
    check(architecture.strangers(ours))


def test_a_sound_house_breaks_no_rule(tmp_path: Path) -> None:
    sound = build(tmp_path, SOUND)
    assert [breach for rule in RULES for breach in rule(sound)] == []


@pytest.mark.parametrize(
    ("rule", "changed", "says"),
    [
        (
            architecture.upward,
            {"scripts/distmuon/sharding/grid.py": "def f():\n    from distmuon.optim.muon import Muon\n"},
            "scripts/distmuon/sharding/grid.py:2 imports distmuon.optim.muon, which stands above it",
        ),
        (
            architecture.upward,
            {"scripts/distmuon/optim/muon.py": "if TYPE_CHECKING:\n    import muonbook.notebook\n"},
            "scripts/distmuon/optim/muon.py:2 imports muonbook.notebook, which stands above it",
        ),
        (
            architecture.upward,
            {"scripts/distmuon/optim/muon.py": "from ..verify import proof\n", "scripts/distmuon/verify/proof.py": ""},
            "scripts/distmuon/optim/muon.py:1 imports distmuon.verify.proof, which stands above it",
        ),
        (
            architecture.upward,
            {"scripts/muonbook/figures/style.py": "from muonbook.ch01 import figure\n"},
            "scripts/muonbook/figures/style.py:1 imports muonbook.ch01.figure, which stands above it",
        ),
        (
            architecture.upward,
            {"scripts/muon_conformance/ranks.py": "from distmuon.optim import muon\n"},
            "scripts/muon_conformance/ranks.py:1 imports distmuon.optim.muon: the kit knows nothing of ours but its",
        ),
        (
            architecture.upward,
            {"scripts/muonbook/notebook.py": "from tools import bench\n"},
            "scripts/muonbook/notebook.py:1 imports tools.bench, which stands above it",
        ),
        (
            architecture.upward,
            {"scripts/muonbook/ch02/figure.py": "from muonbook.ch01 import figure\n"},
            "scripts/muonbook/ch02/figure.py:1 imports muonbook.ch01.figure: chapters do not know each other",
        ),
        (
            architecture.upward,
            {"scripts/02_how.py": 'JOB = "muonbook.ch01.job:train"\n'},
            "scripts/02_how.py:1 imports muonbook.ch01.job: chapters do not know each other",
        ),
        (
            architecture.upward,
            {"scripts/02_how.py": "from tools import bench\n"},
            "scripts/02_how.py:1 imports tools.bench: a worker needs no tool",
        ),
        (
            architecture.upward,
            {"scripts/muonbook/ch01/job.py": "from distmuon import Muon\n"},
            "scripts/muonbook/ch01/job.py:1 imports distmuon: those names are for others",
        ),
        (
            architecture.circles,
            {"scripts/distmuon/launch/start.py": "def run():\n    from distmuon.launch import run\n"},
            "distmuon.launch -> distmuon.launch.start -> distmuon.launch: a circle of modules",
        ),
        (
            architecture.circles,
            {
                "scripts/muonbook/figures/style.py": "from muonbook.measure import results\n",
                "scripts/muonbook/measure/hooks.py": "if TYPE_CHECKING:\n    from muonbook.figures import style\n",
                "scripts/muonbook/measure/results.py": "",
            },
            "muonbook.figures -> muonbook.measure -> muonbook.figures: a circle of rooms",
        ),
        (
            architecture.unresolved,
            {"scripts/muonbook/ch01/job.py": "from distmuon.optim import muons\n"},
            "scripts/muonbook/ch01/job.py:1 imports muons, which distmuon.optim does not have",
        ),
        (
            architecture.unresolved,
            {"scripts/muonbook/ch01/job.py": "from distmuon.optim.muon import Moun\n"},
            "scripts/muonbook/ch01/job.py:1 imports Moun, which distmuon.optim.muon does not have",
        ),
        (
            architecture.unresolved,
            {"scripts/01_why.py": 'JOB = "muonbook.ch01.job:trian"\n'},
            "scripts/01_why.py:1 imports trian, which muonbook.ch01.job does not have",
        ),
        (
            architecture.unresolved,
            {"notebooks/02_how.ipynb": "x = 1\nfrom muonbook.notebooks import start"},
            "notebooks/02_how.ipynb imports muonbook.notebooks, which does not exist",
        ),
        (
            architecture.strangers,
            {"scripts/muonbook/ch02/figure.py": ""},
            "scripts/muonbook/figures/style.py is used by muonbook.ch01 alone; move it there",
        ),
        (
            architecture.strangers,
            {"scripts/muonbook/ch01/job.py": "from distmuon.verify import odd\n", "scripts/distmuon/verify/odd.py": ""},
            "scripts/distmuon/verify/odd.py is used by muonbook.ch01 alone; move it there",
        ),
        (
            architecture.strangers,
            {"scripts/muonbook/ch01/rest.py": "", "tests/book/ch01/test_one.py": "from muonbook.ch01 import rest\n"},
            "scripts/muonbook/ch01/rest.py is used by nobody; remove it",
        ),
    ],
)
def test_a_rule_bites(rule: Callable[[House], list[str]], changed: dict[str, str], says: str, tmp_path: Path) -> None:
    spoilt = build(tmp_path, SOUND | changed)
    assert any(says in breach and breach.endswith(".") for breach in rule(spoilt)), rule(spoilt)


@pytest.mark.parametrize(
    ("rule", "harmless"),
    [
        (
            architecture.strangers,
            {
                "scripts/distmuon/sharding/ledger.py": "",
                "scripts/distmuon/optim/__init__.py": "",
                "scripts/distmuon/optim/muon.py": "from distmuon.sharding import grid, ledger\n\nclass Muon: ...\n",
            },
        ),
        (
            architecture.strangers,
            {
                "scripts/distmuon/verify/odd.py": "",
                "notebooks/03_if.ipynb": "%load x\nfrom distmuon.verify import odd",
            },
        ),
        (
            architecture.unresolved,
            {"scripts/muonbook/ch01/job.py": "import torch\nfrom numpy import nothing\n\ndef train(): ...\n"},
        ),
    ],
)
def test_a_rule_lets_pass_what_is_meant_to(
    rule: Callable[[House], list[str]], harmless: dict[str, str], tmp_path: Path
) -> None:
    assert rule(build(tmp_path, SOUND | harmless)) == []
