"""The fit finds constants again, looks at nothing that is held out, and the stored measurement says what it says."""

from __future__ import annotations

import random

import pytest

from muonbook.measure import results
from muonbook.planner.measured import step_fit, worlds
from muonbook.planner.measured.step_fit import MEANINGS, TimedStep

KNOWN = {
    "passes": 2e-11, "orthogonalizing": 1e-11, "elements": 1e-8, "parameters": 1e-4, "matrices": 2e-4, "units": 1e-3,
    "messages": 3e-4, "copying": 4e-9, "ring": 1.1, "exchange": 1.4,
}  # fmt: skip


def steps(count: int = 60) -> list[TimedStep]:
    """Return steps that take as long as the model says; every third is held out."""
    draw, found = random.Random(0), []
    for number in range(count):
        asked = {
            "passes": draw.uniform(1e8, 1e9),
            "orthogonalizing": draw.uniform(1e8, 2e9),
            "elements": draw.uniform(1e5, 1e6),
            "parameters": draw.randint(10, 60),
            "matrices": draw.randint(1, 9),
            "units": draw.choice([0, 8]),
            "messages": draw.randint(4, 60),
            "ring_bytes": draw.uniform(1e5, 4e6),
            "exchange_bytes": draw.uniform(1e5, 4e6),
            "ranks": draw.choice([2, 4, 8]),
        }
        rate = draw.choice([None, 30.0, 100.0])
        step = TimedStep(str(number), "muon", number % 3 == 0, rate, 2, asked, 0.0)
        found.append(step._replace(seconds=step_fit.seconds(KNOWN, step)))
    return found


def test_known_constants_are_found_again() -> None:
    found = step_fit.fit(steps())
    assert found == pytest.approx(KNOWN, rel=1e-6)
    assert max(abs(step_fit.error(found, step)) for step in steps()) < 1e-6


def test_held_out_steps_do_not_move_the_constants() -> None:
    changed = [step._replace(seconds=9.0) if step.held_out else step for step in steps()]
    assert step_fit.fit(changed) == step_fit.fit(steps())
    assert step_fit.errors_of(changed, KNOWN)["steps"] == sum(step.held_out for step in changed)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="4 steps for 10 constants; measure more worlds"):
        step_fit.fit(steps(6))


def test_ranks_that_share_cores_take_longer_and_a_links_rate_is_each_ranks_own() -> None:
    step = next(step for step in steps() if step.rate_mbit is None and step.asked["ranks"] == 4)
    alone = step._replace(cores=4)
    assert step_fit.seconds(KNOWN, step) == pytest.approx(2 * step_fit.seconds(KNOWN, alone))
    slow = dict.fromkeys(MEANINGS, 0.0) | {"ring": 1.0}
    linked = step._replace(rate_mbit=8.0)
    assert step_fit.seconds(slow, linked) == pytest.approx(linked.asked["ring_bytes"] * 1e-6)


# ---- The stored measurement -----------------------------------------------------------------------------------


def test_the_stored_worlds_are_those_that_would_be_measured() -> None:
    found = results.load("planner")
    assert [world["title"] for world in found["worlds"]] == [world.title for world in worlds.WORLDS]
    assert all(told["bytes_as_predicted"] for world in found["worlds"] for told in world["baselines"].values())


def test_the_stored_errors_follow_from_the_stored_steps() -> None:
    found = results.load("planner")
    timed = step_fit.timed(found)
    assert step_fit.fit(timed) == pytest.approx(found["constants"], rel=1e-9)
    assert step_fit.errors_of(timed, found["constants"]) == pytest.approx(found["errors"])


def test_held_out_steps_are_met() -> None:
    errors = results.load("planner")["errors"]
    assert errors["median"] <= 0.15
    assert errors["within_25_percent"] >= 0.8 * errors["steps"]  # all of them were wanted
    assert errors["worst"] <= 0.4


def test_what_is_held_out_differs_in_width_grid_rate_or_strategy() -> None:
    fitted = [world for world in worlds.WORLDS if not world.held_out]
    for world in (world for world in worlds.WORLDS if world.held_out):
        alike = [(other.dp, other.tp, other.width, other.rate_mbit) for other in fitted]
        assert (world.dp, world.tp, world.width, world.rate_mbit) not in alike
    assert set(worlds.HELD_OUT_BASELINES) < set(worlds.BASELINES)
