"""The rules of the house hold in the tree, and each of them bites on a small tree that breaks it."""

from __future__ import annotations

import functools
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
    architecture.unused,
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


@functools.cache
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


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_every_rule(rule: Callable[[House], list[str]]) -> None:
    breaches = rule(ours())
    assert not breaches, "\n" + "\n".join(breaches)


def test_a_sound_house_breaks_no_rule(tmp_path: Path) -> None:
    sound = build(tmp_path, SOUND)
    assert [breach for rule in RULES for breach in rule(sound)] == []


BITES: dict[Callable[[House], list[str]], tuple[dict[str, str], str]] = {  # rule -> what breaks it, and what it says
    architecture.upward: (
        {"scripts/distmuon/sharding/grid.py": "def f():\n    from distmuon.optim.muon import Muon\n"},
        "scripts/distmuon/sharding/grid.py:2 imports distmuon.optim.muon, which stands above it",
    ),
    architecture.circles: (
        {
            "scripts/muonbook/figures/style.py": "from muonbook.measure import results\n",
            "scripts/muonbook/measure/hooks.py": "if TYPE_CHECKING:\n    from muonbook.figures import style\n",
            "scripts/muonbook/measure/results.py": "",
        },
        "muonbook.figures -> muonbook.measure -> muonbook.figures: a circle of rooms",
    ),
    architecture.unresolved: (
        {"scripts/01_why.py": 'JOB = "muonbook.ch01.job:trian"\n'},
        "scripts/01_why.py:1 imports trian, which muonbook.ch01.job does not have",
    ),
    architecture.unused: (
        {"scripts/muonbook/ch01/rest.py": "", "tests/book/ch01/test_one.py": "from muonbook.ch01 import rest\n"},
        "scripts/muonbook/ch01/rest.py is used by nobody; remove it",
    ),
}


@pytest.mark.parametrize("rule", BITES)
def test_a_rule_bites(rule: Callable[[House], list[str]], tmp_path: Path) -> None:
    changed, says = BITES[rule]
    found = rule(build(tmp_path, SOUND | changed))
    assert any(says in breach and breach.endswith(".") for breach in found), found
