"""The cost model by hand on small cases, and a step without communication."""

from __future__ import annotations

import pytest
import torch

from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from muonbook.ch15.timed_steps import GroupWithoutCommunication, trainer_without_communication
from muonbook.measure.workload import SHAPES
from muonbook.planner.cost_model import Collective, LinkCost, collective_seconds, collectives_of, hops, step_seconds

LINK = LinkCost(alpha_seconds=0.5, bytes_per_second=100.0)


@pytest.mark.parametrize(
    ("op", "ranks", "ring", "tree"),
    [
        ("all_gather", 4, 3, 2),
        ("reduce_scatter", 5, 4, 3),
        ("all_reduce", 4, 6, 4),
        ("all_reduce", 1024, 2046, 20),
        ("all_gather", 1, 0, 0),
    ],
)
def test_hops_of_rings_and_trees(op: str, ranks: int, ring: int, tree: int) -> None:
    assert hops(op, ranks) == ring
    assert hops(op, ranks, "tree") == tree


@pytest.mark.parametrize(("op", "latency"), [("gossip", "ring"), ("all_gather", "star")])
def test_what_is_unknown_is_refused_by_name(op: str, latency: str) -> None:
    with pytest.raises(ValueError, match=r"no cost for .*; known: .*all_gather"):
        hops(op, 4, latency)


def test_seconds_of_a_step_by_hand() -> None:
    gather = Collective("all_gather", "dp", 4, 400, calls=2)
    assert collective_seconds(gather, LINK) == 2 * (3 * 0.5 + 300 / 100)
    assert collective_seconds(gather._replace(group_size=1), LINK) == 0
    tp = ("all_reduce", "tp", 2, 100, 1)
    links = {"dp": LINK, "tp": LinkCost(0.25, 50.0)}
    assert step_seconds(1.0, [gather, tp], links) == 1 + 9 + (2 * 0.25 + 100 / 50)


def test_the_world_goes_over_dps_link_and_no_other_group_does() -> None:
    row = ("all_reduce", "world", 2, 100, 1)
    assert step_seconds(0.0, [row], {"dp": LINK}) == 2 * 0.5 + 100 / 100
    assert step_seconds(0.0, [row], {"dp": LINK, "world": LinkCost(0.0, 10.0)}) == 10
    with pytest.raises(ValueError, match="'tp' has no link"):
        step_seconds(0.0, [("all_reduce", "tp", 2, 100, 1)], {"dp": LINK})


def test_a_ledger_becomes_collectives() -> None:
    ledger = Ledger()
    ledger.record("all_gather", "dp", 4, 400, "momentum", calls=3)
    ledger.record("all_reduce", "world", 8, 16, "norms")
    assert collectives_of(ledger, {"dp": 4, "world": 8}) == [
        ("all_gather", "dp", 4, 400, 3),
        ("all_reduce", "world", 8, 16, 1),
    ]


# ---- Without communication ----------------------------------------------------------------------------------


def test_a_group_without_communication_returns_the_shapes_and_sums_of_ranks_that_all_say_the_same() -> None:
    group = GroupWithoutCommunication("dp", 3, 1)
    shard = torch.tensor([1.0, 2.0])
    assert group.all_gather(shard, "x").tolist() == [1, 2] * 3
    out = torch.empty(2)
    assert group.all_gather(shard, "x", out=torch.empty(6)).tolist() == [1, 2] * 3
    assert group.reduce_scatter(torch.arange(6.0), out, "x").tolist() == [6, 9]
    assert group.all_reduce(shard, "x").tolist() == [1, 2]
    assert group.broadcast(shard, "x").tolist() == [1, 2]
    assert group.all_to_all(torch.arange(6.0), "x").tolist() == list(range(6))
    came = group.all_to_all_v([torch.ones(2), torch.empty(0), torch.ones(1)], (1, 0, 4), "x")
    assert [part.tolist() for part in came] == [[1], [], [1, 1, 0, 0]]  # as far as its own go
    assert list(group.ledger) == []


@pytest.mark.parametrize("name", ["muon", "muon_cut", "muon_owner", "ddp"])
def test_a_step_without_communication_sends_nothing_and_stays_finite(name: str) -> None:
    workload, grid = SHAPES["even"].shared_by(4), Grid.alone()
    four = Grid(
        GroupWithoutCommunication("dp", 4, 2),
        grid.tp,
        GroupWithoutCommunication("world", 4, 2),
        grid.device,
        grid.ledger,
    )
    trainer = trainer_without_communication(name, workload, four)
    ids = torch.arange(64).view(1, 64) % 18
    for _ in range(2):
        trainer.step((ids, ids))
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
