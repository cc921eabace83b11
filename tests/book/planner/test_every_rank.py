"""What all ranks hold, send and compute at once is what each of them holds, sends and computes by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distmuon.optim import strategies
from distmuon.optim.strategies.costs import PlannedRank
from distmuon.optim.strategies.periodic import OPTIONS
from distmuon.verify.model_states import predict_shards
from distmuon.verify.prediction import predict_step, predict_transient, predict_work
from muonbook.planner.cost_model import LinkCost
from muonbook.planner.fabrics import FABRICS
from muonbook.planner.model_shapes import MODELS, Experts
from muonbook.planner.owned_worlds import QUICK, plan_part
from muonbook.planner.parts import every_rank
from muonbook.planner.planned_worlds import Load, PlannedWorld, undominated
from muonbook.planner.priced_worlds import PricedWorld

GRIDS = [(4, 2, 3_000_000), (6, 1, 20_000_000), (3, 4, 2**62), (16, 2, 400_000)]


@pytest.fixture(
    params=[(s, g) for s in [*QUICK, "blockwise"] for g in GRIDS], ids=lambda p: f"{p[0]}-{p[1][0]}x{p[1][1]}"
)
def part(request: pytest.FixtureRequest) -> PlannedWorld:
    strategy, (dp, tp, bucket_size) = request.param
    shape = replace(MODELS["moonlight"], layers=2, width=512, mlp=1024, vocabulary=1000, context=64)
    shape = replace(shape, experts=Experts(routed=6, active=2, width=384, shared=384, dense_layers=1))
    specs, muon = shape.specs(tp)
    return plan_part(specs, muon, dp, tp, bucket_size, strategy)


@pytest.mark.parametrize("part", [(s, g) for s in QUICK for g in GRIDS], indirect=True)
def test_a_strategy_is_priced_by_its_costs_as_by_what_is_written_down_for_all_ranks_at_once(part: PlannedWorld) -> None:
    priced = PricedWorld(part.dp, part.tp, part.layout, part.muon, part.strategy)
    mine, theirs = (every_rank.Zero1Part(world) for world in (part, priced))
    assert mine.sent().keys() == theirs.sent().keys()
    for move, amounts in mine.sent().items():
        assert of_all(part, amounts).tolist() == of_all(part, theirs.sent()[move]).tolist(), move
    assert of_all(part, mine.flops()).tolist() == theirs.flops().tolist()
    assert mine.update_bytes == theirs.update_bytes
    links = FABRICS["nvlink_infiniband"].links(part.dp, part.tp)
    assert mine.update_seconds(links, 1e12) == pytest.approx(theirs.update_seconds(links, 1e12), rel=1e-12)
    assert part.redundancy == pytest.approx(priced.redundancy)
    assert part.has_owners == priced.has_owners or part.tp == 1


def test_periodic_costs_the_mean_of_its_steps() -> None:
    specs, muon = MODELS["gpt2"].specs(2)
    plans = [plan_part(specs, muon, 3, 2, 10**7, strategy) for strategy in ("periodic", "owner")]
    periodic, whole = map(every_rank.Zero1Part, plans)
    blocks = predict_work("blockwise", plans[0].layout, 2, muon)
    every, moves = OPTIONS["whole_every"], (periodic.sent(), whole.sent())
    assert moves[0]["tp", "momentum"] == pytest.approx(moves[1]["tp", "momentum"] / every)
    assert moves[0]["dp", "gradients"].tolist() == moves[1]["dp", "gradients"].tolist()
    expected = [(one + (every - 1) * block) / every for one, block in zip(whole.flops(), blocks.values(), strict=True)]
    assert periodic.flops() == pytest.approx(expected)


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


@pytest.mark.parametrize("part", [("gather_cut", (3, 4, 2**62))], indirect=True)
def test_a_move_takes_what_the_rank_sends_that_sends_most(part: PlannedWorld) -> None:
    sent = part.momentum_sent()
    assert any(each.max() > each.mean() for each in sent)
    assert every_rank.outer_messages(part)["momentum"].sent_bytes == sum(int(each.max()) for each in sent)


def test_a_bucket_waits_for_its_slowest_rank_in_the_gather_and_at_the_end() -> None:
    loads = (Load(calls=0, sent_bytes=0, flops=10), Load(calls=2, sent_bytes=4, flops=1))
    found = every_rank.orthogonalizing_seconds({loads: 3}, 2, LinkCost(1.0, 1.0), 1.0)
    assert found == {"tp_gather": 3 * (2 + 4), "orthogonalizing": 3 * 10}
