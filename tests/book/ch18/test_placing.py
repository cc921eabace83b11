"""What the chapter says of divisions follows from plans that anyone can redo, and from its own cells."""

from __future__ import annotations

import math
from typing import Any

import pytest
import stored_pages

from muonbook.ch18 import divisions
from muonbook.measure import results
from muonbook.planner import choices
from muonbook.planner.model_shapes import find_shape
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting


@pytest.mark.parametrize("number", range(len(divisions.WORLDS)))
def test_stored_divisions_are_those_that_the_planner_finds(number: int) -> None:
    """All of them by their degrees; of each world one planned anew, for all would take minutes."""
    world: dict[str, Any] = results.load("divisions")["worlds"][number]
    rows, (model, ranks) = world["divisions"], divisions.WORLDS[number]
    possible = choices.divisions(WorldSetting(find_shape(model), Degrees(0)), ranks)
    assert [row["degrees"] for row in rows] == [list(setting.degrees) for setting in possible]
    assert world["ranks"] == ranks
    row = rows[len(rows) // 2]
    plan = WorldPlan(WorldSetting(find_shape(model), Degrees(*row["degrees"])))
    assert round(plan.fullest[2]) == row["bytes"]
    assert float(f"{plan.step_seconds:.4g}") == row["seconds"]


def test_with_half_of_the_gpus_a_step_takes_twice_as_long_and_the_waiting_does_not() -> None:
    """The page's second and third row: half the share, of exactly and of nearly as many seconds."""
    names: dict[str, Any] = {}
    exec(stored_pages.cell_with("18_beyond_one_machine", "def bubble(").source, names)

    def times(dp: int, stages: int) -> tuple[float, float]:  # a stage waits; a step: in layers' micro-batches
        layers, micro_batches = math.ceil(names["LAYERS"] / stages), names["SEQUENCES"] // dp
        step = (micro_batches + stages - 1) * layers
        return names["bubble"](stages, micro_batches) * step, step

    (waits, step), (of_dp, with_dp), (of_stages, with_stages) = times(16, 16), times(8, 16), times(16, 8)
    assert of_dp == pytest.approx(waits)
    assert 0.9 < of_stages / waits < 1
    assert [round(other / step, 1) for other in (with_dp, with_stages)] == [1.9, 1.9]
