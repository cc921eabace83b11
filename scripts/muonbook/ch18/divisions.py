"""Worlds divided in every way, and each way really planned: for the puzzle, and for the page on planning.

Deterministic, and no process is started; a minute or two, so the results are stored (book/results/divisions.json).
"""

from __future__ import annotations

from typing import Any

from distmuon.launch import UsageError
from muonbook.planner.choices import divisions, search
from muonbook.planner.model_shapes import find_shape
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting, short

WORLDS = (("moonlight", 64), ("llama3_70b", 512), ("kimi_k2", 1024))  # of the puzzle
QUICK = WORLDS[:2]
MODEL = "kimi_k2"  # on the slider
SIZES = tuple(1 << n for n in range(8, 14))  # ranks: 256 to 8,192


def survey(quick: bool = False) -> dict[str, Any]:
    """Return every division of the puzzle's worlds, and the best plan for the slider's model in every size of world."""
    worlds = [_divided(model, ranks) for model, ranks in (QUICK if quick else WORLDS)]
    return {"worlds": worlds, "sizes": [_best(ranks) for ranks in (SIZES[-1:] if quick else SIZES)]}


def _divided(model: str, ranks: int) -> dict[str, Any]:
    """Return every division without sequence parallelism, so that memory is scarce and the puzzle is one."""
    setting = WorldSetting(find_shape(model), Degrees(0))
    rows = [
        {"degrees": list(plan.setting.degrees), "bytes": round(plan.fullest[2]), "seconds": short(plan.step_seconds)}
        for plan in map(WorldPlan, divisions(setting, ranks))
    ]
    return {"title": setting.shape.title, "ranks": ranks, "room": setting.device.memory_bytes, "divisions": rows}


def _best(ranks: int) -> dict[str, Any]:
    """Return the quickest plan that fits with sequence parallelism, in numbers; without a division where none does."""
    setting = WorldSetting(find_shape(MODEL), Degrees(0), sequence_parallel=True)
    place = {"title": setting.shape.title, "ranks": ranks, "room": setting.device.memory_bytes}
    try:
        plan = search(setting, ranks).plans[0]
    except UsageError:
        return place | {"degrees": None}
    return place | {
        "degrees": str(plan.setting.degrees),
        "held": {kind: round(size) for kind, size in plan.held_at_worst.items()},
        "step_seconds": short(plan.step_seconds),
        "seconds": {name: short(took) for name, took in plan.seconds.items()},
        "of_the_peak": short(plan.model_flops_share),
    }
