"""What each way to cut costs Muon: a published model on 64 ranks, planned as every world that is too large to start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from distmuon.optim.newton_schulz import flops
from distmuon.sharding.layout import plan
from distmuon.sharding.ledger import ring_bytes
from muonbook.figures.style import in_bytes
from muonbook.markdown_table import table
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.parts.every_rank import states
from muonbook.planner.parts.fsdp_worlds import FsdpPart
from muonbook.planner.planned_worlds import BUCKET_RULES, MOMENTUM_BYTES, PlannedWorld
from muonbook.planner.stages import expert_of, stage_of, units_of

WORLD, WAYS = 64, 8
MODEL = MODELS["moonlight"]


class Price(NamedTuple):
    """What Muon costs the rank that has most of it: bytes of momentum kept (float32), of it sent (bf16), operations."""

    kept: float
    sent: float
    flops: float


@cache
def prices() -> dict[str, Price]:
    """Return cut -> what it costs, on 64 ranks, with ZeRO-1 over the DP group in all rows but the first and third."""
    specs, muon = MODEL.specs(1)
    matrices = [specs[index].shape for index in muon]
    size, everything = sum(map(math.prod, matrices)), float(sum(map(flops, matrices)))
    by_rows = sum(ring_bytes("all_gather", MOMENTUM_BYTES * math.prod(shape), WORLD) for shape in matrices)
    rows = FsdpPart(specs, frozenset(muon), WORLD, 1, units_of(specs)).states()["momentum"]
    dp = WORLD // WAYS
    zero1 = _busiest(_of_ranks(WORLD))
    stages = [_of_ranks(dp, names=partial(in_stage, stage)) for stage in range(WAYS)]
    return {
        f"DP {WORLD}, momentum not cut": Price(4 * size, 0, everything),
        f"DP {WORLD}, ZeRO-1 or -2": zero1,
        f"DP {WORLD}, FSDP2 (all gather all)": Price(float(rows.max()), by_rows, everything),
        f"DP {dp} × TP {WAYS}": _busiest(_of_ranks(dp, WAYS)),
        f"DP {dp} × PP {WAYS}": _most(map(_busiest, stages)),
        f"DP {WORLD}, with EP {WAYS} inside": _with_experts(dp),
        f"DP {dp} × CP {WAYS}": zero1,  # gradients are summed, and state is cut, over both
    }


def _with_experts(replicas: int) -> Price:
    experts = [_of_ranks(replicas, names=partial(_in_expert_rank, rank)) for rank in range(WAYS)]
    no_experts = _of_ranks(WORLD, names=lambda name: expert_of(name) is None)
    return _busiest(no_experts + np.stack(experts, axis=-1).reshape(no_experts.shape))  # dp = ep + E x replica


def _busiest(of_ranks: np.ndarray) -> Price:
    return Price(*of_ranks.max(axis=1).tolist())


def _most(prices: Iterable[Price]) -> Price:
    return Price(*map(max, zip(*prices, strict=True)))


def _of_ranks(dp: int, tp: int = 1, names: Callable[[str], bool] = lambda name: True) -> np.ndarray:
    """Return what parameters with such names cost each DP rank of dp x tp that have no others, a row for each field of
    `Price`: ZeRO-1, `gather_all`."""
    specs, muon = MODEL.specs(tp)
    held = [index for index, spec in enumerate(specs) if names(spec.name)]
    layout = plan([specs[index] for index in held], dp, BUCKET_RULES["megatron"](dp))
    ours = frozenset(place for place, index in enumerate(held) if index in set(muon))
    world = PlannedWorld(dp, tp, layout, ours)
    by_dp = [world.ledger(muon=muon).total(group="dp").sent_bytes for muon in (True, False)]
    _, over_tp, work = map(np.array, world.rank_loads())
    return np.stack([states(world)["momentum"], by_dp[0] - by_dp[1] + over_tp, work])


def in_stage(stage: int, name: str) -> bool:
    """Return whether a pipeline stage has this parameter."""
    return stage_of(name, MODEL.layers, WAYS) == stage


def _in_expert_rank(rank: int, name: str) -> bool:
    """Return whether this is a routed expert of one of `WAYS` ranks, which share them out evenly."""
    expert = expert_of(name)
    assert MODEL.experts is not None
    return expert is not None and expert * WAYS // MODEL.experts.routed == rank


def markdown() -> str:
    """Return what each cut costs Muon on the busiest rank of all, as a table."""
    heads = (f"on the busiest of {WORLD} ranks", "momentum kept", "momentum sent in a step", "Newton–Schulz in a step")
    return table(heads, [(f"**{name}**", *_written(price)) for name, price in prices().items()])


def _written(price: Price) -> tuple[str, str, str]:
    return in_bytes(price.kept), in_bytes(price.sent) if price.sent else "nothing", f"{price.flops / 1e12:.3g} TFLOP"
