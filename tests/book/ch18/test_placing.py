"""The chapter's pictures and small puzzles follow from the story, and from plans that anyone can redo."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from muonbook.ch18 import moving_machines, small_puzzles
from muonbook.ch18.moving_machines import DIES_IN, SAVE_EVERY, STEPS, frames_of_a_loss
from muonbook.ch18 import divisions
from muonbook.ch18.plans.moving_plans import PARTS, by_part, frames_of_sizes
from muonbook.figures import player
from muonbook.measure import results
from muonbook.planner.choices import search
from muonbook.planner.model_shapes import find_shape
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting


def test_what_is_lost_in_the_picture_is_what_was_done_since_the_last_save() -> None:
    saved = (DIES_IN - 1) // SAVE_EVERY * SAVE_EVERY
    story = moving_machines.story()
    assert [what for what in story if isinstance(what, int)] == [*range(1, DIES_IN + 1), *range(saved + 1, STEPS + 1)]
    frames = frames_of_a_loss()
    lost = ", ".join(str(step) for step in range(saved + 1, DIES_IN + 1))
    assert f"Lost: steps {lost}." in frames[-1].alt
    assert "Lost" not in frames[3].alt
    assert f"Saved: {saved}, {2 * SAVE_EVERY}, {STEPS}." in frames[-1].alt
    assert "<svg" in player.html("machines", frames)


def test_a_picture_of_plans_shows_every_second_and_byte() -> None:
    sizes = [size for size in results.load("divisions")["sizes"] if size["degrees"]]
    frames = frames_of_sizes(results.load("divisions")["sizes"])
    assert len(frames) == len(sizes) <= len(divisions.SIZES)
    assert "<svg" in player.html("plans", frames)
    for size, frame in zip(sizes, frames, strict=True):
        parts = by_part(size["seconds"])
        assert list(parts) == list(PARTS)
        assert math.isclose(sum(parts.values()), size["step_seconds"], rel_tol=2e-3)
        assert sum(size["held"].values()) <= size["room"]
        assert size["degrees"] in frame.alt


def test_a_part_of_a_step_that_no_colour_stands_for_is_an_error() -> None:
    with pytest.raises(StopIteration):
        by_part({"something new": 1.0})


@pytest.mark.parametrize("number", range(len(divisions.WORLDS)))
def test_stored_divisions_are_those_that_the_planner_finds(number: int) -> None:
    """All of them by their degrees; three of each world planned anew, for all would take minutes."""
    world: dict[str, Any] = results.load("divisions")["worlds"][number]
    rows, (model, ranks) = world["divisions"], divisions.WORLDS[number]
    possible = search.divisions(WorldSetting(find_shape(model), Degrees(0)), ranks)
    assert [row["degrees"] for row in rows] == [list(setting.degrees) for setting in possible]
    assert world["ranks"] == ranks
    for row in (rows[0], rows[len(rows) // 2], rows[-1]):
        plan = WorldPlan(WorldSetting(find_shape(model), Degrees(*row["degrees"])))
        assert round(plan.fullest[2]) == row["bytes"]
        assert float(f"{plan.step_seconds:.4g}") == row["seconds"]
        assert math.prod(row["degrees"][:3]) == world["ranks"]


def test_stored_plans_on_the_slider_are_those_of_todays_planner() -> None:
    """Each division planned anew; that it is the quickest is searched for once, on the fewest ranks that hold it."""
    stored = [size for size in results.load("divisions")["sizes"] if size["degrees"]]
    for size in stored:
        degrees = Degrees(*map(int, re.findall(r"\d+", size["degrees"])))
        plan = WorldPlan(WorldSetting(find_shape(divisions.MODEL), degrees))
        assert size["held"] == {kind: round(amount) for kind, amount in plan.held_at_worst.items()}
        assert size["seconds"] == {name: float(f"{took:.4g}") for name, took in plan.seconds.items()}
        assert size["step_seconds"] == float(f"{plan.step_seconds:.4g}")
    found = search.search(WorldSetting(find_shape(divisions.MODEL), Degrees(0)), stored[0]["ranks"])
    assert str(found.plans[0].setting.degrees) == stored[0]["degrees"]


def test_a_first_impression_is_told_in_lines() -> None:
    found = {
        "worlds": [{"title": "A", "ranks": 8, "room": 5, "divisions": [{"bytes": 4}, {"bytes": 6}]}],
        "sizes": [
            {"title": "A", "ranks": 8, "degrees": None},
            {"title": "A", "ranks": 16, "degrees": "16 DP", "step_seconds": 1.5},
        ],
    }
    assert divisions.lines(found) == [
        "A, 8 ranks: 1 of 2 fit",
        "A, 8 ranks: nothing fits",
        "A, 16 ranks: 16 DP, 1.5 s",
    ]


def test_no_other_interval_wastes_less() -> None:
    cost, between = 2.0, 1000.0
    best = small_puzzles.save_every(cost, between)

    def waste(interval: float) -> float:
        return cost / interval + interval / (2 * between)

    assert all(waste(best) <= waste(best * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


def test_what_the_page_says_of_plans_is_stored() -> None:
    errors = results.load("planner")["errors"]
    assert (errors["steps"], errors["within_25_percent"]) == (34, 30)
    assert [f"{errors[which]:.0%}" for which in ("median", "worst")] == ["6%", "30%"]
    sizes = {size["ranks"]: size for size in results.load("divisions")["sizes"]}
    assert round((sizes[256]["room"] - sum(sizes[256]["held"].values())) / 1e9, 2) == 0.26
    assert round(sizes[1024]["step_seconds"] / sizes[8192]["step_seconds"]) == 5
    shares = [size["seconds"]["Newton–Schulz"] / size["step_seconds"] for size in sizes.values() if size["degrees"]]
    assert 0.008 < min(shares) <= max(shares) < 0.07
    held = [sizes[ranks]["held"]["parameters"] for ranks in (1024, 2048)]
    assert round(held[1] / held[0], 1) == 2.0
    assert "32 PP" in sizes[1024]["degrees"]
    assert "16 PP" in sizes[2048]["degrees"]
