"""Figures that others have published of their clusters, and what the planner says of the same worlds.

We did not tune the planner to these. For each we state what we assume: products run at `SUSTAINED` of a card's peak in
bf16, as everywhere in the planner, and AdamW's step is the one that was published, because we cannot plan the seconds
of other people's networks. So what is compared is Newton–Schulz, and what it adds to that step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from muonbook.markdown_table import table
from muonbook.planner.fabrics import DEVICES, SUSTAINED
from muonbook.planner.model_shapes import MODELS, Experts, Shape
from muonbook.planner.planned_baselines import PLANNED_BASELINES
from muonbook.planner.stages import Degrees
from muonbook.planner.world_plan import WorldPlan, WorldSetting

GB300_PEAK = 2.5e15  # bf16 FLOPs per second, dense: NVIDIA, GB300 NVL72 datasheet, 180e15 for 72
A800_PEAK = DEVICES["a100"].peak_flops  # an A100 with a slower NVLink
H100_PEAK = DEVICES["h100"].peak_flops

QWEN3_30B = Shape(
    "Qwen3 30B-A3B", "Qwen/Qwen3-30B-A3B, config.json, with attention of width x width", layers=48, width=2048,
    heads=32, key_heads=4, mlp=6144, vocabulary=151936, context=4096,
    experts=Experts(routed=128, active=8, width=768, shared=768, dense_layers=0),
)  # fmt: skip
QWEN25_7B = Shape(
    "Qwen2.5 7B", "Qwen/Qwen2.5-7B, config.json", layers=28, width=3584, heads=28, key_heads=4, mlp=18944,
    vocabulary=152064, context=4096,
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """what: the quantity. by: who published it. world: model, ranks and how they are divided.

    published, planned: values. second_hand: whether we have it from others' notes alone.
    """

    what: str
    by: str
    world: str
    published: float
    planned: Callable[[], float]
    second_hand: bool = False


@cache
def plan(shape: Shape, degrees: Degrees, tokens: int) -> WorldPlan:
    return WorldPlan(WorldSetting(shape, degrees, tokens=tokens).by(PLANNED_BASELINES["muon_owner"]))


def _seconds(flops: float, peak: float) -> float:
    return flops / (SUSTAINED * peak)


def _added(shape: Shape, degrees: Degrees, tokens: int, adamw_tflops: float) -> float:
    """Return what Newton–Schulz of the slowest rank adds to a step in which AdamW reached so many TFLOP/s per GPU."""
    adamw = 6 * shape.active * tokens / degrees.ranks / (adamw_tflops * 1e12)
    return _seconds(plan(shape, degrees, tokens).flops[1], GB300_PEAK) / adamw


K2, QWEN3 = (MODELS["kimi_k2"], Degrees(64, 1, 4, 64), 1 << 24), (QWEN3_30B, Degrees(8, 1, 1, 8), 1 << 21)
SEVEN_B, SEVENTY_B = (QWEN25_7B, Degrees(256, 1, 1, 1), 1 << 22), (MODELS["llama3_70b"], Degrees(32, 1, 1, 1), 1 << 18)
DMUON_ADAMW = 2.844  # seconds of a step, 256 GPUs


def _everywhere() -> float:
    """Return seconds of Newton–Schulz where every rank does it for all matrices of the 7B."""
    return _seconds(plan(*SEVEN_B).flops[0] * SEVEN_B[1].ranks, A800_PEAK)


ADDED, TIMED = "what Muon adds to AdamW's step", "seconds of Newton–Schulz"
FIGURES = (
    Published(
        ADDED,
        "NVIDIA, April 2026",
        "Kimi K2's sizes, 256 GB300",
        1051 / 1029 - 1,
        lambda: _added(*K2, 1051),
    ),
    Published(
        ADDED,
        "NVIDIA, April 2026",
        "Qwen3 30B-A3B, 8 GB300",
        713 / 686 - 1,
        lambda: _added(*QWEN3, 713),
    ),
    Published(
        ADDED,
        "DMuon, June 2026",
        "Qwen2.5 7B, 256 A800, every GPU orthogonalizes all matrices",
        6.219 / DMUON_ADAMW - 1,
        lambda: _everywhere() / DMUON_ADAMW,
        second_hand=True,
    ),
    Published(
        ADDED,
        "DMuon, June 2026",
        "Qwen2.5 7B, 256 A800, one owner per matrix",
        2.850 / DMUON_ADAMW - 1,
        lambda: _seconds(plan(*SEVEN_B).flops[1], A800_PEAK) / DMUON_ADAMW,
        second_hand=True,
    ),
    Published(
        TIMED,
        "DMuon, June 2026",
        "Qwen2.5 7B, 256 A800, every GPU orthogonalizes all matrices",
        3.604,
        _everywhere,
        second_hand=True,
    ),
    Published(
        TIMED,
        "Gram Newton–Schulz, March 2026",
        "Llama 3 70B, 32 H100, the part of one GPU",
        0.897417,
        lambda: _seconds(plan(*SEVENTY_B).flops[0], H100_PEAK),
    ),
)


def markdown() -> str:
    """Return a table of what clusters have measured and what the planner says of them."""
    rows = [
        (
            figure.what,
            f"{figure.by}{'†' * figure.second_hand}: {figure.world}",
            *(_value(figure, value) for value in (figure.published, figure.planned())),
        )
        for figure in FIGURES
    ]
    return table(("what", "where", "published", "our plan"), rows)


def _value(figure: Published, value: float) -> str:
    return f"{value:.2f} s" if figure.what == TIMED else f"{100 * value:.3g} %"
