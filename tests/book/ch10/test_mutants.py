"""The certificate has teeth: each of the small mistakes in `muonbook.ch10.mutants` fails at least one of its rows."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import worlds

from distmuon.models.recipe import Recipe
from distmuon.verify.certificate import Certificate
from distmuon.verify.drift import Drift
from distmuon.verify.training import Run
from muonbook.ch10 import mutant_trial
from muonbook.ch10.mutant_trial import COLUMNS, HEALTHY, table
from muonbook.ch10.mutants import MUTANTS

JOB = str(worlds.ROOT / "scripts" / "10_dp_tp.py")
WITHOUT_BF16 = {"exact", "exact bf16", "float64", "unrounded"}
# The rows that must fail. What the coarse float32 row sees depends on the machine.
FAILS = dict.fromkeys(MUTANTS, WITHOUT_BF16) | {
    "gradients not divided by D": {"exact", "float64"},  # Newton–Schulz divides by the norm, and AdamW by the root
    "no master weights": {"exact bf16"},  # a float32 model has none
    "accumulation in the model's dtype": {"exact bf16"},
    "stale parameters on one rank": {"float64", "unrounded", "replicas"},  # exact looks at DP rank 0
}
UNCERTAIN = {"gradients not divided by D": {"unrounded", "exact bf16"}}  # as far as AdamW's eps can be seen


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[worlds.Ending, dict[str, Any]]:
    """The ending of the worker, with all mutants in one world, and what it stored."""
    path = tmp_path_factory.mktemp("mutants") / "mutants.json"
    command = [sys.executable, JOB, "--mutants", "--dp", "2", "--tp", "2", "--json", str(path)]
    ending = subprocess.run(command, capture_output=True, text=True, check=False)
    return worlds.Ending(ending.returncode, ending.stdout, ending.stderr), json.loads(path.read_text())


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mistake_fails_the_rows_that_can_see_it(tried: tuple[worlds.Ending, dict[str, Any]], name: str) -> None:
    rows, shown = tried[1]["verdicts"], "\n".join(table(tried[1]["verdicts"]))
    fine = WITHOUT_BF16 | {"replicas"}
    failed = {row for row in fine if rows[name][row] is False}
    assert failed - UNCERTAIN.get(name, set()) == FAILS[name], shown


def test_without_a_mistake_no_row_fails_and_the_fine_ones_pass(tried: tuple[worlds.Ending, dict[str, Any]]) -> None:
    healthy = tried[1]["verdicts"][HEALTHY]
    assert all(healthy[row] for row in WITHOUT_BF16 | {"replicas"})
    assert False not in healthy.values()


def test_what_is_not_rounded_is_held_a_thousand_times_tighter(tried: tuple[worlds.Ending, dict[str, Any]]) -> None:
    found = tried[1]["differences and bounds"]
    assert found[HEALTHY]["unrounded"][1] < 1e-3 * found[HEALTHY]["float32"][1]
    for name in ("no weight decay", "weight decay doubled", "momentum kept in bf16"):  # what it was made for
        assert found[name]["float32"][0] < 0.5 * found["four Newton–Schulz steps for five"]["float32"][0]


def test_the_table_has_a_line_for_every_mistake_and_ends_with_the_verdict(tried) -> None:
    ending, stored = tried
    assert (ending.code, ending.err) == (0, "")
    assert list(stored["verdicts"]) == [HEALTHY, *MUTANTS]
    assert all(tuple(rows) == COLUMNS for rows in stored["verdicts"].values())
    lines = ending.out.splitlines()
    assert lines[1:-1] == table(stored["verdicts"])
    assert lines[-1] == "Every mistake is noticed by some row: True. Without one, no row fails: True."


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--mutants --dp 4 --tp 1", "--mutants --dp 4 --tp 1: most mistakes need both cuts; choose 2 or more of each."),
        ("--mutants --tp 3", "--tp 3 does not divide the layers' 256 features; choose one of 1, 2, 4, 8, 16, 32"),
        ("--mutants --steps 9", "--steps does nothing with --mutants; leave one of the two out."),
    ],
)
def test_mutants_that_cannot_be_tried_are_refused_in_a_sentence(wrong: str, says: str) -> None:
    ending = worlds.answer(JOB, *wrong.split())
    assert (ending.code, ending.out) == (2, "")
    assert ending.err.startswith(f"error: {says}")


def test_an_unnoticed_mistake_is_said_and_exits_with_1(monkeypatch, capsys) -> None:
    drifts = dict.fromkeys(("unrounded", "float32"), Drift(0.0, 0.0))
    blind = mutant_trial.Judged(Certificate(True, 0.0, drifts, True, Run([], {}, 0.0)), True)
    monkeypatch.setattr(mutant_trial, "judge", lambda *given: {HEALTHY: blind, "no Nesterov": blind})
    well, _ = mutant_trial.report(({}, torch.device("cpu")), Recipe(), 2, 2, 1)
    assert not well
    assert "noticed by some row: False. Without one, no row fails: True." in capsys.readouterr().out
