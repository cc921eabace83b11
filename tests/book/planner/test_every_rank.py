"""What all ranks hold, send and compute at once is what each of them holds, sends and computes by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distmuon.optim import strategies
from distmuon.optim.strategies.costs import PlannedRank
from distmuon.verify.model_states import predict_shards
from distmuon.verify.prediction import predict_step, predict_transient, predict_work
from muonbook.planner.model_shapes import MODELS, Experts
from muonbook.planner.owned_worlds import KINDS, plan_part
from muonbook.planner.parts import every_rank
from muonbook.planner.planned_worlds import PlannedWorld, undominated

GRIDS = [(4, 2, 3_000_000), (6, 1, 20_000_000), (3, 4, 2**62), (16, 2, 400_000)]


@pytest.fixture(params=[(s, g) for s in KINDS for g in GRIDS], ids=lambda p: f"{p[0]}-{p[1][0]}x{p[1][1]}")
def part(request: pytest.FixtureRequest) -> PlannedWorld:
    strategy, (dp, tp, bucket_size) = request.param
    shape = replace(MODELS["moonlight"], layers=2, width=512, mlp=1024, vocabulary=1000, context=64)
    shape = replace(shape, experts=Experts(routed=6, active=2, width=384, shared=384, dense_layers=1))
    specs, muon = shape.specs(tp)
    return plan_part(specs, muon, dp, tp, bucket_size, strategy)


def ranks(world: PlannedWorld) -> list[tuple[int, int]]:
    return [(dp, tp) for dp in range(world.dp) for tp in range(world.tp)]


def of_all(world: PlannedWorld, column: np.ndarray) -> np.ndarray:
    """Return a column over DP ranks as one over all ranks."""
    return np.repeat(column, world.tp * world.dp // len(column))


@pytest.mark.parametrize("muon", [True, False])
def test_states_are_those_of_every_rank(part: PlannedWorld, muon: bool) -> None:
    found = every_rank.states(part, muon)
    for dp in range(part.dp):
        alone = predict_shards(part.layout, dp, part.muon if muon else ())
        assert {kind: int(column[dp]) for kind, column in found.items()} == alone


@pytest.mark.parametrize("muon", [True, False])
def test_bytes_are_those_of_every_rank(part: PlannedWorld, muon: bool) -> None:
    moves = every_rank.Zero1Part(part, muon).sent()
    for group, column in every_rank.by_group(moves).items():
        for place, (dp, tp) in enumerate(ranks(part)):
            alone = predict_step(part.layout, part.tp, dp, part.muon if muon else (), part.strategy, tp_rank=tp)
            assert of_all(part, column)[place] == alone.total(group=group).sent_bytes, (group, dp, tp)
            if muon:
                assert of_all(part, part.rank_loads()[0])[place] == alone.total(group="tp").calls


def test_work_is_that_of_every_rank(part: PlannedWorld) -> None:
    alone = predict_work(part.strategy, part.layout, part.tp, part.muon)
    assert of_all(part, part.rank_loads()[2]).tolist() == [alone[rank] for rank in ranks(part)]


def test_transient_bytes_are_those_of_the_worst_rank(part: PlannedWorld) -> None:
    allocates = strategies.costs_of(part.strategy).allocates
    ranks = [PlannedRank(part.layout, part.muon, part.tp, dp, compute_bytes=2) for dp in range(part.dp)]
    worst = max(allocates(rank) for rank in ranks)
    assert part.transient_bytes == worst


def test_a_step_allocates_on_the_worst_rank_what_the_prediction_bounds(part: PlannedWorld) -> None:
    for muon in (True, False):
        given = part.layout, part.tp
        mine = part.muon if muon else ()
        bounds = [
            predict_transient(*given, dp, mine, part.strategy, None, "bfloat16", native_reduce_scatter=True)
            for dp in range(part.dp)
        ]
        assert every_rank.Zero1Part(part, muon).update_bytes == max(bounds)


def test_what_a_bucket_waits_for_are_those_whom_nobody_exceeds_in_everything() -> None:
    columns = np.array([[1, 3, 2, 1, 3], [5, 1, 4, 4, 1]])
    assert undominated(columns) == ((3, 1), (2, 4), (1, 5))
