"""A training on a grid has the loss curve of the single process; with a mistake in it, it has not."""

import math
from dataclasses import replace
from typing import Any

import learning_workers as workers
import pytest
from learning_workers import SEED, SETTINGS, STEPS, small
from once import once

from distmuon import launch
from distmuon.launch import UsageError
from distmuon.verify.bounds import FLOAT64_BOUND
from muonbook.ch04 import sharded_training, training
from muonbook.ch04.search_space import Setting
from muonbook.ch04.sharded_training import Comparison
from muonbook.ch04.tasks import TASKS
from muonbook.ch04.training import Outcome

FLOAT64 = [(task, optimizer, "float64") for task in ("digits", "language") for optimizer in SETTINGS]
FLOAT32 = [("digits", "muon", "float32"), ("language", "adamw", "float32")]
CASES = {(2, 1): FLOAT64, (1, 2): FLOAT64, (2, 2): [*FLOAT64, *FLOAT32]}
ROUNDING = 0.02  # of the movement: Newton–Schulz in bf16, where the processor has it, turns last bits into third digits


@once
def compared(dp: int, tp: int) -> list[workers.Found]:
    return launch.run(workers.compare_all, (CASES[dp, tp],), dp=dp, tp=tp)


@once
def odd() -> list[dict[str, Any]]:
    return launch.run(workers.compare_wrong, dp=2)


# ---- It is the same training ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "case"),
    [(grid, case) for grid, cases in CASES.items() for case in cases],
    ids=lambda value: "-".join(map(str, value)),
)
def test_the_curve_is_that_of_the_single_process(grid: tuple[int, int], case: tuple[str, str, str]) -> None:
    found, *others = [rank.comparisons[CASES[grid].index(case)] for rank in compared(*grid)]
    assert others == [None] * len(others)
    assert isinstance(found, Comparison)
    assert found.difference <= (FLOAT64_BOUND if case[2] == "float64" else ROUNDING)
    assert found.on_grid.steps == found.alone.steps
    assert len(found.on_grid.training) == STEPS
    assert found.alone.held_out[-1] < 0.9 * found.alone.training[0]  # so that there is a movement to compare with
    if case[2] == "float64":
        assert found.on_grid.accuracy == pytest.approx(found.alone.accuracy, abs=1e-12)


@pytest.mark.parametrize(("dp", "tp"), CASES)
def test_every_rank_knows_the_same_outcome(dp: int, tp: int) -> None:
    first, *others = [rank.outcome for rank in compared(dp, tp)]
    assert len(first.training) == 3
    assert others == [first] * (dp * tp - 1)


def test_a_training_that_diverges_does_so_at_the_same_step() -> None:
    found = odd()[0]["diverging"]
    assert found.on_grid.final == math.inf
    assert found.on_grid.accuracy == found.alone.accuracy == 0
    assert len(found.on_grid.training) == len(found.alone.training) < STEPS
    assert found.difference <= FLOAT64_BOUND


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("optimizer", SETTINGS)
def test_a_gradient_that_is_not_finite_ends_the_run_as_in_one_process(optimizer: str) -> None:
    task, setting, lost_at = small("digits"), SETTINGS[optimizer], 4
    model = task.fresh_model(SEED)
    workers.lose_a_gradient(model, lost_at)
    alone = training.train(task, setting, SEED, model=model)
    on_one = workers.course_of(task, setting, lost_at)
    assert on_one.training == pytest.approx(alone.training, rel=1e-12)
    assert on_one.held_out == pytest.approx(alone.held_out, rel=1e-12)
    assert len(alone.training) == lost_at + 2
    assert math.isfinite(alone.training[lost_at])
    assert alone.training[-1] == on_one.final == math.inf


# ---- A mistake shows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", workers.WRONG)
def test_a_training_with_a_mistake_has_another_curve(mistake: str) -> None:
    assert odd()[0][mistake].difference > 1000 * FLOAT64_BOUND


def outcome(training: list[float], held_out: list[float]) -> Outcome:
    return Outcome(SETTINGS["muon"], 0, [1, 2], held_out, training, 0.5)


def test_the_difference_is_the_largest_over_the_movement() -> None:
    alone = outcome([3.0, 2.0], [2.5, 1.0])
    assert Comparison(alone, alone).difference == 0
    assert Comparison(outcome([3.0, 2.25], [2.5, 1.125]), alone).difference == 0.125
    assert Comparison(outcome([3.0, math.inf], [2.5, math.inf]), alone).difference == math.inf
    assert Comparison(outcome([3.0], [math.inf] * 2), alone).difference == math.inf
    diverged = outcome([4.0, math.inf], [math.inf] * 2)
    assert Comparison(diverged, diverged).difference == 0
    assert Comparison(outcome([3.0, math.inf], [math.inf] * 2), diverged).difference == 0.25


def test_the_table_shows_both_curves() -> None:
    found = Comparison(outcome([3.0, 2.0], [2.5, 1.00004]), outcome([3.0, 2.0], [2.5, math.inf]))
    assert found.lines() == [
        "step   on the grid   in one process",
        "   1        2.5000           2.5000",
        "   2        1.0000              inf",
    ]


# ---- Refused before anything starts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "optimizer", "dp", "tp", "says"),
    [
        (
            "digits",
            "sgd",
            1,
            1,
            "'sgd' has no sharded form here, only a single-process one; choose one of muon, adamw.",
        ),
        ("digits", "lion", 1, 1, "'lion' has no sharded form here; choose one of muon, adamw."),
        ("digits", "muon", 3, 1, "--dp 3 cannot share out the 128 rows of a batch; choose one of 1, 2, 4, 8, 16, 32,"),
        ("digits", "muon", 0, 1, "--dp 0 cannot share out the 128 rows"),
        ("digits", "adamw", 1, 3, "--tp 3 does not fit: layers.0: 256 outputs cannot be split evenly over 3 TP ranks;"),
        ("language", "muon", 2, 8, "blocks.0: 4 heads cannot be split evenly over 8 TP ranks; choose one of 1, 2, 4."),
        ("cifar10", "muon", 2, 1, "'cifar10' draws random numbers while it trains"),
    ],
)
def test_what_cannot_be_trained_on_a_grid_is_refused_with_the_remedy(
    task: str, optimizer: str, dp: int, tp: int, says: str
) -> None:
    with pytest.raises(UsageError) as refused:
        sharded_training.check(TASKS[task], Setting(optimizer, 0.01, 0.0, 0.9), dp, tp)
    assert says in str(refused.value)
    assert str(refused.value).endswith(".")


def test_what_can_be_trained_is_not_refused() -> None:
    for name in ("digits", "language", "mnist", "fashion"):
        for dp, tp in ((1, 1), (4, 2), (8, 4)):
            sharded_training.check(TASKS[name], SETTINGS["muon"], dp, tp)
    with pytest.raises(UsageError, match="draws random numbers"):
        sharded_training.check(replace(TASKS["digits"], augment=lambda images: images), SETTINGS["muon"], 1, 1)
