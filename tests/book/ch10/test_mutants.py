"""The certificate has teeth: each of the small mistakes in `muonbook.ch10.mutants` fails the rows that it should."""

import json
from typing import Any

import pytest
import stored_pages
import torch
import worlds

from distmuon.models.recipe import Recipe
from distmuon.verify.bounds import CONTROL_FACTOR, Drift
from distmuon.verify.certificate import Certificate
from distmuon.verify.problem import Run
from muonbook.ch10 import mutant_trial
from muonbook.ch10.mutant_trial import COLUMNS, HEALTHY, table
from muonbook.ch10.mutants import MUTANTS

JOB = str(worlds.ROOT / "scripts" / "10_dp_tp.py")
WITHOUT_BF16 = {"exact", "exact bf16", "float64", "unrounded"}
FINE = WITHOUT_BF16 | {"replicas"}  # what the coarse float32 row sees depends on the machine
FAILS = dict.fromkeys(MUTANTS, WITHOUT_BF16) | {  # the fine rows that must fail
    "gradients not divided by D": {"exact", "float64"},  # Newton–Schulz divides by the norm, and AdamW by the root
    "no master weights": {"exact bf16"},  # a float32 model has none
    "accumulation in the model's dtype": {"exact bf16"},
    "stale parameters on one rank": {"float64", "unrounded", "replicas"},  # exact looks at DP rank 0
}
UNCERTAIN = {"gradients not divided by D": {"unrounded", "exact bf16"}}  # as far as AdamW's eps can be seen
SMALL = ("no weight decay", "weight decay doubled", "momentum kept in bf16")  # what the unrounded row was made for


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All mistakes, tried as chapter 11 does it."""
    path = tmp_path_factory.mktemp("trial") / "mutants.json"
    ending = worlds.perform(JOB, "--mutants", "--dp", "2", "--tp", "2", "--json", str(path))
    assert (ending.code, ending.err) == (0, "")
    return json.loads(path.read_text())


def test_seventeen_mistakes_are_tried_as_the_chapters_say(trial: dict[str, Any]) -> None:
    assert list(trial["verdicts"]) == [HEALTHY, *MUTANTS]
    assert len(MUTANTS) == 17
    for column in COLUMNS:  # no check finds them all
        assert any(trial["verdicts"][name][column] for name in MUTANTS), column


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_fails_the_fine_rows_that_it_should_and_no_other(trial: dict[str, Any], name: str) -> None:
    rows = trial["verdicts"][name]
    assert set(rows) == set(COLUMNS)
    assert {row for row in FINE if rows[row] is False} - UNCERTAIN.get(name, set()) == FAILS[name] != set()


def test_the_healthy_optimizer_passes_every_fine_row_and_fails_none(trial: dict[str, Any]) -> None:
    healthy = trial["verdicts"][HEALTHY]
    assert all(healthy[row] for row in FINE)
    assert False not in healthy.values()


def test_what_is_not_rounded_is_held_a_thousand_times_tighter(trial: dict[str, Any]) -> None:
    apart = trial["differences and bounds"]
    assert apart[HEALTHY]["unrounded"][1] < 1e-3 * apart[HEALTHY]["float32"][1]
    control = apart[HEALTHY]["unrounded"][1] / CONTROL_FACTOR
    assert min(apart[name]["unrounded"][0] for name in SMALL) > 1e3 * control  # as chapter 6 says
    for name in SMALL:  # moves by less than half of what one Newton–Schulz step fewer does
        assert apart[name]["float32"][0] < 0.5 * apart["four Newton–Schulz steps for five"]["float32"][0]


def test_the_page_shows_the_lines_of_which_it_speaks(trial: dict[str, Any]) -> None:
    shown = stored_pages.cell_with("11_bug_museum", "--mutants").printed.splitlines()
    told = HEALTHY, "no weight decay", "gradients not divided by D", "no master weights", "stale parameters on one rank"
    first, *lines = table({name: trial["verdicts"][name] for name in told})
    assert shown[1] == first
    assert [line[:34] for line in shown[2:-1]] == [line[:34] for line in lines]
    assert shown[-1] == "Every mistake is noticed by some row: True. Without one, no row fails: True."


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--mutants --dp 4 --tp 1", "--mutants --dp 4 --tp 1: most mistakes need both cuts; choose 2 or more of each."),
        ("--mutants Nesterov", "--mutants 'Nesterov': there is no such mistake; choose one of no weight decay, "),
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
