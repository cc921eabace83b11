"""Planned worlds are planned as runs are: same layouts, same bytes, every rank; and the arithmetic on them is exact."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.newton_schulz import flops
from distmuon.optim.routing import split_parameters
from distmuon.sharding.grid import Grid
from distmuon.verify.prediction import predict_step
from distmuon.verify.strategy_predictions import of_strategy
from muonbook.ch15.planned_steps import TimedWorld, best, robustness, seconds, square_cost, sweet_spot
from muonbook.ch15.worlds_survey import gather_cut_340m, moonlight, reported_world, survey
from muonbook.measure.workload import Workload
from muonbook.planner.cost_model import collectives_of, step_seconds
from muonbook.planner.fabrics import CORNERS, FABRICS, NODE, Factors
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.planned_worlds import BUCKET_RULES, Load, PlannedWorld, grids, plan_world

SMALL = [
    ("gpt2", 16, 4, 3_000_000),
    ("gpt2", 24, 1, 10**7),
    ("llama3_8b", 64, 8, 25_000_000),
    ("moonlight", 4, 2, 10**8),
]


@pytest.fixture(params=SMALL, ids=lambda case: "-".join(map(str, case)))
def world(request: pytest.FixtureRequest) -> PlannedWorld:
    model, dp, tp, bucket_size = request.param
    shape = MODELS[model]
    if model != "gpt2":
        shape = replace(shape, layers=2)
    return plan_world(shape, dp, tp, bucket_size)


def loads(world: PlannedWorld, dp_rank: int) -> list[Load]:
    """Return what one rank does, bucket by bucket, found without a shortcut: from the prediction and the map."""
    found = []
    for bucket in world.layout.buckets:
        ledger = world.ledger(dp_rank)
        mine = [i for i in bucket.params if i in world.muon and dp_rank in world.layout.owners(bucket, i)]
        labels = {f"momentum, {world.layout.specs[i].name}" for i in mine}
        rows = [traffic for entry, traffic in ledger if entry.group == "tp" and entry.label in labels]
        work = sum(flops(world.layout.specs[i].full_shape(world.tp)) for i in mine)
        found.append(Load(sum(row.calls for row in rows), sum(row.sent_bytes for row in rows), work))
    return found


# Shapes


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("gpt3_175b", 174_604_259_328),
        ("llama2_7b", 6_738_415_616),
    ],
)
def test_models_have_the_published_number_of_parameters(model: str, parameters: int) -> None:
    assert MODELS[model].parameters == parameters


def test_moonlight_has_the_two_numbers_that_its_paper_gives() -> None:
    moonlight = MODELS["moonlight"]
    hidden = sum(math.prod(w.shape) for w in moonlight.weights() if w.name.startswith(("blocks", "norm")))
    assert f"{hidden / 1e9:.2f}" == "15.29"
    assert f"{(moonlight.active - moonlight.vocabulary * moonlight.width) / 1e9:.2f}" == "2.24"  # without the head


def test_a_cut_model_is_the_whole_model() -> None:
    for shape in MODELS.values():
        whole, muon = shape.specs(1)
        for tp in (tp for tp in (2, 4, 8, 16, 32) if shape.permits(tp)):
            cut, same = shape.specs(tp)
            assert muon == same
            assert [spec.full_shape(tp) for spec in cut if spec.name not in ("tokens", "head")] == [
                spec.shape for spec in whole if spec.name not in ("tokens", "head")
            ]


def test_heads_limit_tp() -> None:
    assert [tp for _, tp in grids(MODELS["llama3_70b"], 4096)] == [1, 2, 4, 8]  # eight heads of keys
    assert [tp for _, tp in grids(MODELS["gpt3_175b"], 1024)] == [1, 2, 4, 8, 16, 32]
    with pytest.raises(ValueError, match="Llama 3 8B has 32 heads, 8 of keys: not to be cut over T=16"):
        MODELS["llama3_8b"].specs(16)


# Layouts


def test_every_rank_of_a_planned_world_is_counted(world: PlannedWorld) -> None:
    per_rank = [[sum(column) for column in zip(*loads(world, rank), strict=True)] for rank in range(world.dp)]
    mean, most = world.total_load()
    assert list(mean) == pytest.approx([sum(column) / world.dp for column in zip(*per_rank, strict=True)], rel=1e-12)
    assert list(most) == [max(column) for column in zip(*per_rank, strict=True)]


def test_bucket_groups_hold_the_slowest_rank_of_every_bucket(world: PlannedWorld) -> None:
    everybody = list(zip(*(loads(world, rank) for rank in range(world.dp)), strict=True))  # by bucket
    for price in (Load(1, 0, 0), Load(0, 1, 0), Load(0, 0, 1), Load(10**9, 10, 1), Load(1, 10**5, 1)):

        def cost(load: Load, price: Load = price) -> float:
            return sum(a * b for a, b in zip(load, price, strict=True))

        exhaustive = sum(max(map(cost, bucket)) for bucket in everybody)
        assert sum(times * max(map(cost, kept)) for kept, times in world.bucket_groups.items()) == exhaustive


def test_transient_bytes_are_those_of_the_worst_rank(world: PlannedWorld) -> None:
    bound = of_strategy("gather_all").allocates
    worst = max(bound(world.layout, world.muon, world.tp, rank, None, 2) for rank in range(world.dp))
    assert world.transient_bytes == worst


def test_state_is_that_of_all_ranks_divided(world: PlannedWorld) -> None:
    whole = [spec.numel for spec in world.layout.specs]
    padded = sum(bucket.padded for bucket in world.layout.buckets)
    in_muon = sum(whole[i] for i in world.muon)
    shared = 4 * padded + 4 * in_muon + 8 * (sum(whole) - in_muon)
    assert world.state_bytes == pytest.approx(6 * padded + shared / world.dp, abs=1)


def test_redundancy_is_one_where_every_rank_has_its_own_matrices() -> None:
    alone = plan_world(MODELS["gpt2"], 1, 1, 10**9)
    assert alone.redundancy == (1.0, 1)
    assert alone.spread == 1.0
    assert alone.gather_cut_bytes == 0.0


def test_redundancy_reaches_every_rank_where_a_bucket_holds_one_matrix() -> None:
    world = plan_world(MODELS["gpt3_175b"], 512, 2, BUCKET_RULES["ours"](512))
    assert world.redundancy == (1024.0, 1024)


def test_the_reports_own_world_sends_least_where_all_four_ranks_stand_in_a_row() -> None:
    rows = reported_world()
    assert [(row["dp"], row["tp"]) for row in rows] == [(4, 1), (2, 2), (1, 4)]
    assert rows[0]["bytes"] > rows[1]["bytes"] > rows[2]["bytes"]
    assert rows[0]["seconds"] > rows[1]["seconds"] > rows[2]["seconds"] == 1


def test_what_muon_adds_to_moonlight_halves_where_the_batch_doubles() -> None:
    rows = moonlight()
    for small, large in zip(rows[::2], rows[1::2], strict=True):
        assert small["ranks"] == large["ranks"]
        assert small["extra"] == pytest.approx(2 * large["extra"], rel=1e-3)
        assert small["optimizer"] > small["extra"]


def test_the_arithmetic_of_gather_cut_is_as_claimed() -> None:
    rows = gather_cut_340m()
    assert [row["bytes_over_zero1"] for row in rows] == [1.000, 1.004, 1.005, 1.006, 1.006]
    assert [row["redundancy"] for row in rows] == [1.0, 1.11, 1.62, 2.36, 6.93]


# A step of the real optimizer, on one rank of a large world whose collectives do nothing


@pytest.fixture
def fake_world() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("dp", "tp", "rank"), [(16, 4, 37), (128, 8, 777), (1024, 1, 1023)])
def test_the_optimizer_sends_what_is_planned(fake_world: None, dp: int, tp: int, rank: int) -> None:
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=dp * tp)
    native = World(rank, dp * tp, dp, tp, "nccl", "cpu", timeout=60.0, threads=1, started=0.0)
    grid = Grid.of(native)
    job = Workload(vocabulary=64, width=64, layers=2, heads=16, context=16, bucket_size=30_011)
    model = job.model(grid.tp)
    optimizer = DistributedMuon(split_parameters(model), grid, bucket_size=job.bucket_size)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    grid.ledger.clear()
    optimizer.step()
    layout, muon, _ = job.plan(dp, tp)
    assert grid.ledger == predict_step(layout, tp, grid.dp.rank, muon)


# Wires and time


def test_a_group_within_a_node_has_the_inside_wire() -> None:
    fabric = FABRICS["nvlink_infiniband"]
    wires = fabric.links(64, 8)
    assert wires["tp"] == fabric.inside
    assert fabric.links(4, 2)["dp"] == fabric.inside


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_dp_groups_share_what_leaves_a_node(tp: int) -> None:
    fabric = FABRICS["nvlink_ethernet"]
    wire = fabric.links(4096 // tp, tp)["dp"]
    assert wire.bytes_per_second * min(tp, NODE) == fabric.between.bytes_per_second


def test_hops_inside_a_node_are_cheaper() -> None:
    fabric = FABRICS["nvlink_infiniband"]
    hops = 14 * fabric.inside.alpha_seconds + fabric.between.alpha_seconds  # a ring of 16 in two nodes
    assert fabric.links(16, 1)["dp"].alpha_seconds == pytest.approx(hops / 15)


@pytest.mark.parametrize("name", FABRICS)
def test_a_step_takes_what_the_cost_model_says(name: str) -> None:
    world = plan_world(MODELS["gpt2"], 16, 2, 10**9)  # one bucket: its slowest rank is a rank's whole step
    wires = FABRICS[name].links(16, 2)
    step = TimedWorld.of(world).step(FABRICS[name], 1 << 20)
    sizes = {"dp": 16, "tp": 2, "world": 32}
    took = []
    for rank in range(16):
        rows = collectives_of(world.ledger(rank), sizes)
        small = step_seconds(0.0, [row for row in rows if row.group == "world"], wires, "tree")
        took.append(small + step_seconds(0.0, [row for row in rows if row.group != "world"], wires))
    assert step.communication == pytest.approx(max(took))
    assert step.muon > step.adamw > step.computation > 0
    assert step.adamw + step.momentum + step.orthogonalizing == step.muon


def test_muon_of_no_matrices_would_be_adamw() -> None:
    world = plan_world(MODELS["gpt2"], 16, 2, 10**7)
    adamw = collectives_of(world.ledger(muon=False), {"dp": 16, "tp": 2, "world": 32})
    fabric = FABRICS["one_wire"]
    step = TimedWorld.of(world).step(fabric, 1 << 20)
    dp_only = step_seconds(0.0, [row for row in adamw if row.group == "dp"], fabric.links(16, 2))
    assert step.gradients + step.parameters == pytest.approx(dp_only)


# Which T?


@pytest.mark.parametrize("ranks", [64, 256, 1024])
def test_with_one_wire_the_sweet_spot_is_four_times_more_tp_than_dp(ranks: int) -> None:
    def sent(tp: int, spread: float) -> float:  # per element of the matrices: reduce-scatter and two gathers, TP gather
        return (4 + 2 + 2) * (1 / tp - 1 / ranks) + 2 * spread * (tp - 1) / ranks

    for spread, ratio in ((1.0, 4), (4.0, 1)):
        tp = min((1 << n for n in range(ranks.bit_length())), key=lambda t: sent(t, spread))
        assert tp * tp == ratio * ranks  # T / D
        assert tp == sweet_spot(ranks, spread=spread)


def test_moonlight_on_one_wire_has_its_sweet_spot_where_the_closed_form_says() -> None:
    shape = MODELS["moonlight"]
    by_t = {tp: TimedWorld.of(plan_world(shape, dp, tp, 40_000_000)) for dp, tp in grids(shape, 16)}
    took = seconds(by_t, FABRICS["one_wire"], 1 << 22, "communication")
    assert best(took) == sweet_spot(16) == 8
    cost = square_cost(by_t, took)
    assert cost is not None
    assert cost > 0


def test_square_costs_nothing_where_it_is_best_and_is_none_where_heads_forbid_it() -> None:
    by_t = {tp: TimedWorld.of(plan_world(MODELS["gpt2"], 16 // tp, tp, 10**7)) for tp in (1, 2, 4)}
    assert square_cost(by_t, {1: 3.0, 2: 2.0, 4: 1.0}) == 0.0
    assert square_cost(by_t, {1: 1.0, 2: 2.0, 4: 3.0}) == 2.0
    assert square_cost({1: by_t[1]}, {1: 1.0}) is None


def test_robustness_counts_the_assumptions_under_which_the_winner_stays() -> None:
    by_t = {tp: TimedWorld.of(plan_world(MODELS["gpt2"], 64 // tp, tp, 10**7)) for tp in (1, 2, 4)}
    same = robustness(by_t, FABRICS["one_wire"], 1 << 22, "step", [Factors(), Factors()])
    assert same == (1.0, 0.0)
    assert len(set(CORNERS)) == 16
    upset = robustness(by_t, FABRICS["nvlink_ethernet"], 1 << 22, "step", [Factors(), Factors(between=1e-3)])
    assert upset.holds == 0.5
    assert upset.regret > 0


# The survey


def test_the_survey_is_the_same_every_time_and_fits_a_results_file() -> None:
    found = survey(quick=True)
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(survey(quick=True)))
    assert set(found) == {
        "assumptions",
        "models",
        "layouts",
        "cells",
        "verdict",
        "moonlight",
        "reported",
        "gather_cut_340m",
    }
    assert found["verdict"]["with_a_choice"] > 0
    for row in found["layouts"]:
        assert row["dp"] * row["tp"] == row["ranks"]
        assert row["gather_all_bytes"] <= row["gather_all_bytes_most"]
        assert row["gather_cut_over_zero1"] <= row["gather_all_over_zero1"]
        assert row["redundancy"] <= row["redundancy_most"] <= row["ranks"]
    for cell in found["cells"]:
        if cell["tp"] is not None:
            assert str(cell["tp"]) in cell["tp_choices"].split()
            assert cell["over_best_adamw"] >= cell["over_adamw"] > 1
            assert cell["square_cost"] is None or cell["square_cost"] >= 0
