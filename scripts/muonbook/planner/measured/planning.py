"""What planning itself takes: seconds, and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

from distmuon.launch import World
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting

LARGEST = WorldSetting(MODELS["kimi_k2"], Degrees(128, 8, 8, 64))  # 8,192 ranks


def took(plan: Callable[[], object]) -> dict[str, float]:
    """Return what planning takes: seconds, and the most memory that this process ever held, in bytes."""
    began = time.monotonic()
    plan()
    unit = 1 if sys.platform == "darwin" else 1024
    return {"seconds": time.monotonic() - began, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def measure(world: World) -> dict[str, float]:
    """Plan a trillion parameters on 8,192 ranks, all that is told of them; return what that took."""
    return took(lambda: WorldPlan(LARGEST).as_dict())
