"""The certificate has teeth: each of the small mistakes in `muonbook.ch10.mutants` fails at least one of its rows.

Chapter 10 puts all of them on trial, in one world, and asks `mutant_trial.faults` of what was found, whenever
test_notebooks runs it. Here is that this would not pass over a mistake that nothing notices.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import stored_pages
import torch
import worlds

from distmuon.models.recipe import Recipe
from distmuon.verify.bounds import Drift
from distmuon.verify.certificate import Certificate
from distmuon.verify.problem import Run
from muonbook.ch10 import mutant_trial
from muonbook.ch10.mutant_trial import COLUMNS, FAILS, HEALTHY, table
from muonbook.ch10.mutants import MUTANTS

JOB = str(worlds.ROOT / "scripts" / "10_dp_tp.py")


@pytest.fixture
def trial() -> dict[str, Any]:
    """What a trial stores that goes as it should."""
    failing = {HEALTHY: set[str]()} | FAILS
    verdicts = {name: {row: row not in rows for row in COLUMNS} for name, rows in failing.items()}
    apart = {name: {"unrounded": [1e-7, 1e-6], "float32": [0.01, 0.02]} for name in verdicts}
    apart["four Newton–Schulz steps for five"]["float32"] = [0.1, 0.02]
    return {"verdicts": verdicts, "differences and bounds": apart}


def test_the_page_puts_every_mistake_on_trial_and_asks_what_came_of_it() -> None:
    (check,) = (cell for cell in stored_pages.cells("10_dp_tp") if "10-mutants.json" in "".join(cell["source"]))
    assert "assert mutant_trial.faults(trial) == []" in "".join(check["source"])
    assert list(FAILS) == list(MUTANTS)
    assert all(FAILS.values())


def test_a_trial_that_goes_as_it_should_has_no_faults(trial: dict[str, Any]) -> None:
    assert mutant_trial.faults(trial) == []
    trial["verdicts"]["no Nesterov"]["float32"] = False  # what the coarse row says depends on the machine
    trial["verdicts"][HEALTHY]["float32"] = None
    assert mutant_trial.faults(trial) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_every_row_that_should_see_a_mistake_and_does_not_is_a_fault(trial: dict[str, Any], name: str) -> None:
    for row in FAILS[name]:
        changed = copy.deepcopy(trial)
        changed["verdicts"][name][row] = True
        (fault,) = mutant_trial.faults(changed)
        assert fault.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda trial: trial["verdicts"][HEALTHY].update({"float32": False}), "none: {"),
        (lambda trial: trial["verdicts"][HEALTHY].update({"exact": None}), "none: {"),
        (lambda trial: trial["verdicts"].pop("no Nesterov"), "no Nesterov: [] fail"),
        (lambda trial: trial["verdicts"]["no Nesterov"].pop("float32"), "no Nesterov: "),
        (lambda trial: trial["verdicts"]["no master weights"].update({"replicas": False}), "no master weights: "),
        (
            lambda trial: trial["differences and bounds"][HEALTHY].update({"unrounded": [0, 1e-4]}),
            "what is not rounded",
        ),
        (lambda trial: trial["differences and bounds"]["no weight decay"].update({"float32": [0.06, 0]}), "no weight"),
    ],
)
def test_whatever_else_should_not_be_is_a_fault(
    trial: dict[str, Any], change: Callable[[dict[str, Any]], object], says: str
) -> None:
    change(trial)
    assert mutant_trial.faults(trial)[0].startswith(says)


def test_the_table_has_a_line_for_every_mistake(trial: dict[str, Any]) -> None:
    (cell,) = (cell for cell in stored_pages.every_cell("10_dp_tp") if "--mutants" in "".join(cell["source"]))
    shown = "".join("".join(output["text"]) for output in cell["outputs"]).splitlines()
    first, *lines = table(trial["verdicts"])
    assert shown[1] == first
    assert [line[:34] for line in shown[2:-1]] == [line[:34] for line in lines]
    assert shown[-1] == "Every mistake is noticed by some row: True. Without one, no row fails: True."


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
