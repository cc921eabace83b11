"""The chapter's pictures and small puzzles follow from the story, and from plans that anyone can redo."""

from __future__ import annotations

import math
from typing import Any

import pytest
import stored_pages

from muonbook.ch18 import divisions, moving_machines, small_puzzles
from muonbook.ch18.moving_machines import DIES_IN, SAVE_EVERY, STEPS, frames_of_a_loss
from muonbook.figures import player
from muonbook.measure import results
from muonbook.planner import choices
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


@pytest.mark.parametrize("number", range(len(divisions.WORLDS)))
def test_stored_divisions_are_those_that_the_planner_finds(number: int) -> None:
    """All of them by their degrees; of each world one or three planned anew, for all would take minutes."""
    world: dict[str, Any] = results.load("divisions")["worlds"][number]
    rows, (model, ranks) = world["divisions"], divisions.WORLDS[number]
    possible = choices.divisions(WorldSetting(find_shape(model), Degrees(0)), ranks)
    assert [row["degrees"] for row in rows] == [list(setting.degrees) for setting in possible]
    assert world["ranks"] == ranks
    middle = rows[len(rows) // 2]
    for row in [middle] if model == "kimi_k2" else [rows[0], middle, rows[-1]]:
        plan = WorldPlan(WorldSetting(find_shape(model), Degrees(*row["degrees"])))
        assert round(plan.fullest[2]) == row["bytes"]
        assert float(f"{plan.step_seconds:.4g}") == row["seconds"]
        assert math.prod(row["degrees"][:3]) == world["ranks"]


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


def test_with_twice_the_stages_a_step_is_shorter_and_the_waiting_is_not() -> None:
    """The page's second and third row: twice the share, but 3 % more and no more of the time."""
    names: dict[str, Any] = {}
    exec(stored_pages.cell_with("18_beyond_one_machine", "def bubble(").source, names)

    def times(dp: int, stages: int) -> tuple[float, float]:  # a stage waits; a step: in layers' micro-batches
        layers, micro_batches = math.ceil(names["LAYERS"] / stages), names["SEQUENCES"] // dp
        step = (micro_batches + stages - 1) * layers
        return names["bubble"](stages, micro_batches) * step, step

    (waits, step), (of_stages, with_stages), (of_dp, with_dp) = times(16, 16), times(16, 32), times(32, 16)
    assert round(of_stages / waits, 2) == 1.03
    assert of_dp == pytest.approx(waits)
    assert [round(step / other, 1) for other in (with_stages, with_dp)] == [1.9, 1.9]
