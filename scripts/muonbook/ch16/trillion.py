"""A mixture of experts with a trillion parameters, divided among 8,192 ranks by one process, and how long it takes."""

from __future__ import annotations

from distmuon.launch import World
from distmuon.optim import strategies
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE
from distmuon.verify.prediction import predict_work
from muonbook.planner.measured.planning import took
from muonbook.planner.model_shapes import MODELS

DP, TP = 1024, 8
MODEL = MODELS["kimi_k2"]


def plan() -> dict[tuple[int, int], int]:
    """Lay the model out with one owner per matrix; return the work of every rank (dp, tp), in FLOPs."""
    specs, muon = MODEL.specs(TP)
    layout = strategies.planner("owner")(specs, muon, DP, TP, DEFAULT_BUCKET_SIZE)
    return predict_work("owner", layout, TP, muon)


def measure(world: World) -> dict[str, float]:
    """Return what planning takes: seconds, and the most memory that this process ever held."""
    return took(plan)
