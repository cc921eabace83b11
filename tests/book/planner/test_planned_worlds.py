"""Planned worlds are planned as runs are: same layouts, same bytes, every rank; and the arithmetic on them is exact."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.newton_schulz import flops
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE, FLAT
from distmuon.sharding.ledger import Ledger
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.prediction import predict_step
from muonbook.ch15.survey import step_of
from muonbook.measure.workload import Workload
from muonbook.planner.cost_model import collectives_of, step_seconds
from muonbook.planner.fabrics import FABRICS, NODE
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.owned_worlds import QUICK, plan_part
from muonbook.planner.parts.every_rank import outer_messages
from muonbook.planner.planned_baselines import PLANNED_BASELINES
from muonbook.planner.planned_worlds import Load, PlannedWorld, grids

SMALL = [("gpt2", 24, 1, 10**7), ("llama3_8b", 64, 8, 25_000_000), ("moonlight", 4, 2, 10**8)]


@pytest.fixture(params=SMALL, ids=lambda case: "-".join(map(str, case)))
def world(request: pytest.FixtureRequest) -> PlannedWorld:
    model, dp, tp, bucket_size = request.param
    shape = MODELS[model]
    if model != "gpt2":
        shape = replace(shape, layers=2)
    return plan_part(*shape.specs(tp), dp, tp, bucket_size, "gather_all")


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


def test_models_have_the_published_number_of_parameters() -> None:
    published = {
        "gpt2": 124_439_808,
        "llama3_8b": 8_030_261_248,
        "llama3_70b": 70_553_706_496,
        "gpt3_175b": 174_604_259_328,
        "llama2_7b": 6_738_415_616,
    }
    assert {model: MODELS[model].parameters for model in published} == published


def test_moonlight_has_the_two_numbers_that_its_paper_gives() -> None:
    moonlight = MODELS["moonlight"]
    hidden = sum(math.prod(w.shape) for w in moonlight.weights() if w.name.startswith(("blocks", "norm")))
    assert f"{hidden / 1e9:.2f}" == "15.29"
    assert f"{(moonlight.active - moonlight.vocabulary * moonlight.width) / 1e9:.2f}" == "2.24"  # without the head


def test_a_cut_model_is_the_whole_model() -> None:
    for shape in (replace(shape, layers=2) for shape in MODELS.values()):  # one of them with experts
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


@pytest.mark.parametrize("strategy", [*QUICK, "blockwise"])
def test_tp_ranks_that_cut_nothing_are_refused(strategy: str) -> None:
    """Else a row of whole models would be planned, T times the bytes of TP-local ones, without a word."""
    specs, muon = MODELS["gpt2"].specs(1)
    unmarked = [spec._replace(tp_split_dim=None) for spec in specs]
    assert plan_part(unmarked, muon, 2, 1, FLAT, strategy).dp == 2
    with pytest.raises(ValueError, match=r"tp is 2, but no parameter says that it is cut over TP.*or tp 1\."):
        plan_part(unmarked, muon, 2, 2, FLAT, strategy)


# Layouts


def test_bucket_groups_hold_the_slowest_rank_of_every_bucket(world: PlannedWorld) -> None:
    everybody = list(zip(*(loads(world, rank) for rank in range(world.dp)), strict=True))  # by bucket
    for price in (Load(1, 0, 0), Load(0, 1, 0), Load(0, 0, 1), Load(10**9, 10, 1), Load(1, 10**5, 1)):

        def cost(load: Load, price: Load = price) -> float:
            return sum(a * b for a, b in zip(load, price, strict=True))

        exhaustive = sum(max(map(cost, bucket)) for bucket in everybody)
        assert sum(times * max(map(cost, kept)) for kept, times in world.bucket_groups.items()) == exhaustive


@pytest.mark.parametrize(
    ("model", "dp", "tp", "bucket_size", "redundancy"),
    [("gpt2", 1, 1, 10**9, 1.0), ("gpt3_175b", 512, 2, DEFAULT_BUCKET_SIZE, 1024.0)],
)
def test_redundancy_is_one_on_one_rank_and_all_ranks_where_a_bucket_holds_one_matrix(
    model: str, dp: int, tp: int, bucket_size: int, redundancy: float
) -> None:
    assert plan_part(*MODELS[model].specs(tp), dp, tp, bucket_size, "gather_all").redundancy == redundancy


# A step of the real optimizer, on one rank of a large world whose collectives do nothing


JOB = Workload(vocabulary=64, width=64, layers=2, heads=16, context=16, bucket_size=30_011)


def fake_step(strategy: str, dp: int, tp: int, rank: int) -> tuple[Grid, DistributedMuon, Ledger]:
    """Let one rank of a world with NCCL take a step of a small model; return also what torch's dispatcher counted."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=dp * tp)
    try:
        grid = Grid.of(World(rank, dp * tp, dp, tp, "nccl", "cpu", timeout=60.0, threads=1, started=0.0))
        model = JOB.model(grid.tp)
        optimizer = DistributedMuon(split_parameters(model), grid, strategy=strategy, bucket_size=JOB.bucket_size)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        grid.ledger.clear()
        with CollectiveCounter() as counter:
            optimizer.step()
    finally:
        dist.destroy_process_group()
    return grid, optimizer, counter.ledger


def test_the_optimizer_sends_what_is_planned() -> None:
    dp, tp = 128, 8
    grid, *_ = fake_step("gather_all", dp, tp, rank=777)
    layout, muon, _ = JOB.plan(dp, tp)
    assert grid.ledger == predict_step(layout, tp, grid.dp.rank, muon)


@pytest.mark.parametrize("strategy", [*QUICK, "blockwise"])
def test_a_plan_charges_what_the_step_calls_over_dp(strategy: str) -> None:
    """Against torch's dispatcher; `gather_cut`'s all-to-all between neighbours is charged as a ring: see `every_rank`.

    On NCCL nothing goes straight from every rank to every other but what a shard boundary cuts."""
    dp = 4
    steps = [fake_step(strategy, dp, 1, rank) for rank in range(dp)]
    ledgers, optimizer = [ledger for *_, ledger in steps], steps[0][1]
    world = plan_part(optimizer.buffers.layout.specs, list(optimizer.muon), dp, 1, JOB.bucket_size, strategy)
    counted = [ledger.total(group="dp").sent_bytes for ledger in ledgers]
    charged = sum(each.sent_bytes for each in outer_messages(world).values() if each.link == "dp")
    assert max(counted) <= charged <= sum(counted)  # of each bucket its slowest rank
    called = {op for ledger in ledgers for op, group in ledger.by_collective() if group == "dp"}
    assert called == {"reduce_scatter", "all_gather"} | ({"all_to_all"} if strategy == "gather_cut" else set())
    if world.has_owners:
        assert counted == [charged] * dp


# Wires and time


def test_with_eight_tp_ranks_in_a_node_an_exchange_costs_what_a_ring_does() -> None:
    fabric = FABRICS["nvlink_infiniband"]
    assert fabric.exchange(64, 8) == fabric.ring(64, 8)
    outside = 56 / 63  # of what a rank sends
    ring, exchange = (of(64, 1).bytes_per_second for of in (fabric.ring, fabric.exchange))
    assert ring / exchange == pytest.approx(8 * outside)


@pytest.mark.parametrize("tp", [1, 8, 32])
def test_dp_groups_share_what_leaves_a_node(tp: int) -> None:
    fabric = FABRICS["nvlink_ethernet"]
    wire = fabric.links(4096 // tp, tp)["dp"]
    assert wire.bytes_per_second * min(tp, NODE) == fabric.between.bytes_per_second


def test_a_group_within_a_node_has_the_inside_wire_and_hops_there_are_cheaper() -> None:
    fabric = FABRICS["nvlink_infiniband"]
    assert fabric.links(64, 8)["tp"] == fabric.links(4, 2)["dp"] == fabric.inside
    hops = 14 * fabric.inside.alpha_seconds + fabric.between.alpha_seconds  # a ring of 16 in two nodes
    assert fabric.links(16, 1)["dp"].alpha_seconds == pytest.approx(hops / 15)


@pytest.mark.parametrize("name", FABRICS)
def test_a_step_takes_what_the_cost_model_says(name: str) -> None:
    shape = MODELS["gpt2"]
    world = plan_part(*shape.specs(2), 16, 2, FLAT, "gather_all")  # its slowest rank is a rank's whole step
    wires = FABRICS[name].links(16, 2)
    step = step_of("gpt2", 16, 2, PLANNED_BASELINES["muon_flat"], FABRICS[name])
    sizes = {"dp": 16, "tp": 2, "world": 32}
    took = []
    for rank in range(16):
        rows = collectives_of(world.ledger(rank), sizes)
        small = step_seconds(0.0, [row for row in rows if row.group == "world"], wires, "tree")
        took.append(small + step_seconds(0.0, [row for row in rows if row.group != "world"], wires))
    assert step.communication == pytest.approx(max(took))
    assert step.muon > step.adamw > step.passes > 0
