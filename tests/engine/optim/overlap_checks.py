"""On every rank of 2 x 2: the three schedules of a step end alike, on a wire that is as late as it may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checks import check, check_each
from late_wire import Trouble, late_wire
from optimizer_cases import ABSENT, MUON, SMALL, TINY, Case, Weight, build, give, values
from torch import Tensor, nn

from distmuon.launch import World
from distmuon.models.networks import MLP
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.overlap import OVERLAPS, PipelinedMuon, Publishing, Worked
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.collectives import PendingWork
from distmuon.sharding.grid import Grid
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.memory_tracker import StorageTracker

CASES: dict[str, Case] = {
    "bf16 and fp32": SMALL.of_dtype(torch.bfloat16, torch.float32),
    "absent": ABSENT,
    "one element": TINY,
    "one bucket": Case(SMALL.weights, bucket_size=10_000),
}
VARIANTS: dict[str, dict[str, Any]] = {  # of distributed Muon, on the case "absent" if not on all
    "owner": {"strategy": "owner"},
    "updates": {"strategy": "owner", "publish": "updates"},
    "periodic": {"strategy": "periodic", "strategy_options": {"whole_every": 2}},
    "blockwise": {"strategy": "blockwise", "publish": "updates"},
}


def trained(
    case: Case, grid: Grid, schedule: type[DistributedMuon], **options: Any
) -> tuple[dict[str, Tensor], dict[Any, Any], int]:
    """Return parameters and momentum after training, our ledger, and how many collectives torch has dispatched."""
    parameters, optimizer = build(case, grid, schedule, **options)
    grid.ledger.clear()
    with CollectiveCounter() as counter:
        for step in range(case.steps):
            give(case, grid, parameters, step)
            optimizer.step()
    assert not getattr(optimizer, "pending", [])  # nothing is under way
    state = {f"momentum of {n}": optimizer.state[p].get("momentum_buffer") for n, p in parameters.items()}
    kept = {name: momentum for name, momentum in state.items() if momentum is not None}
    return values(parameters) | kept, dict(grid.ledger), counter.ledger.total().calls


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


@check_each([*CASES, *VARIANTS])
def every_schedule_ends_to_the_bit_where_the_synchronous_one_does(world: World, choice: str) -> None:
    """With the same collectives; the synchronous one on an honest wire, the others on one that is late."""
    grid, case, options = Grid.of(world), CASES.get(choice, ABSENT), VARIANTS.get(choice, {})
    expected, ledger, dispatched = trained(case, grid, OVERLAPS["synchronous"], **options)
    assert ledger
    for name, schedule in OVERLAPS.items():
        with late_wire():
            found, its_ledger, its_dispatched = trained(case, grid, schedule, **options)
        assert alike(found, expected), name
        assert (its_ledger, its_dispatched) == (ledger, dispatched), name
    if choice == "one element":  # some own nothing, and gather all the same
        assert ("momentum of only" in expected) == (grid.dp.rank == 0)
    assert "momentum of other rows" not in expected or choice != "absent"


@check
def these_cases_hold_what_is_hard(world: World) -> None:
    layout = build(SMALL, Grid.of(world))[1].buffers.layout
    assert sum(len(layout.owners(b, i)) > 1 for b in layout.buckets for i in b.params) >= 3


class ReadsGathersEarly(PipelinedMuon):
    """Works on a bucket group before its momentum has come together."""

    def make_moves(self, groups: Sequence[Any]) -> None:
        self.step_adamw()
        for buckets in groups:
            self.finish(deque([self.work(self.start(buckets))]), deque(), behind=0)


class ReadsReturnsEarly(PipelinedMuon):
    """Applies updates before they are back over TP."""

    def start_publication(self, worked: Worked) -> Publishing:
        early = super().start_publication(worked._replace(pending=PendingWork()))
        worked.pending.wait()
        return early


class ReadsUpdatesEarly(PipelinedMuon):
    """Applies published updates before they have arrived."""

    def take(self, publishing: Publishing) -> None:
        super().take(publishing._replace(pending=PendingWork()))
        publishing.pending.wait()


MUTANTS: dict[
    str, tuple[type[DistributedMuon], dict[str, Any]]
] = {  # and a variant in which they read what is not there
    "gathers": (ReadsGathersEarly, {}),
    "returns": (ReadsReturnsEarly, VARIANTS["owner"]),
    "updates": (ReadsUpdatesEarly, VARIANTS["updates"]),
}


@check_each(MUTANTS)
def such_a_wire_finds_who_reads_early(world: World, choice: str) -> None:
    grid, (mutant, options) = Grid.of(world), MUTANTS[choice]
    expected, *_ = trained(SMALL, grid, DistributedMuon, **options)
    with late_wire():
        found, *_ = trained(SMALL, grid, mutant, **options)
    assert not alike(found, expected)


def memory(grid: Grid, name: str) -> int:
    """Return the peak bytes of the second step for a deep MLP in many buckets."""
    torch.manual_seed(0)  # ranks that are spawned, not forked, would begin with seeds of their own
    model = MLP([64, *[128] * 12, 10], grid.tp)
    optimizer = OVERLAPS[name](split_parameters(model), grid, bucket_size=10_000)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        with StorageTracker() as tracker:
            optimizer.step()
    return tracker.peak


@check
def a_wave_ahead_takes_the_memory_of_few_gathers_more_and_not_of_all(world: World) -> None:
    synchronous, naive, pipelined = (memory(Grid.of(world), name) for name in ("synchronous", "naive", "pipelined"))
    assert synchronous <= pipelined < naive
    assert pipelined - synchronous < 0.5 * (naive - synchronous)


def in_six_buckets(grid: Grid, name: str) -> tuple[Case, dict[str, nn.Parameter], Any]:
    case = Case(tuple(Weight(f"w{i}", (4, 6), 0) for i in range(6)), (MUON,), steps=1, bucket_size=24)
    return case, *build(case, grid, OVERLAPS[name])


@check_each(["naive", "pipelined"])
def nothing_stays_under_way_after_an_error(world: World, choice: str) -> None:
    """Newton–Schulz fails on every rank in the second bucket group; the next step works."""
    grid = Grid.of(world)
    case, parameters, optimizer = in_six_buckets(grid, choice)
    honest, calls = optimizer.strategy.newton_schulz, [0]
    landed: list[Any] = []

    def fails(matrices: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            landed.extend(work for pending in optimizer.pending for work, *_ in pending._started)
            raise Trouble("the second bucket group")
        return honest(matrices)

    optimizer.strategy.newton_schulz = fails
    give(case, grid, parameters, 0)
    with pytest.raises(Trouble, match="the second bucket group"):
        optimizer.step()
    assert landed or choice == "naive"  # which has waited for everything by then
    assert all(work.is_completed() for work in landed)
    assert not optimizer.pending
    assert grid.dp._pending is None
    optimizer.strategy.newton_schulz = honest
    optimizer.zero_grad()
    give(case, grid, parameters, 0)
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in parameters.values())


def last_rank_fails(world: World) -> None:
    """Let Newton–Schulz fail on the last rank alone, with gathers under way everywhere."""
    grid = Grid.of(world)
    case, parameters, optimizer = in_six_buckets(grid, "pipelined")
    if world.rank == world.size - 1:

        def fails(matrices: Any) -> Any:
            raise Trouble("on the last rank")

        optimizer.strategy.newton_schulz = fails
    give(case, grid, parameters, 0)
    optimizer.step()
