"""What every rank of a grid finds out about the three schedules of a step: one world, many facts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from late_wire import Trouble, late_wire
from optimizer_cases import ABSENT, MUON, RAGGED, SMALL, TINY, Case, Weight, build, give, values
from torch import Tensor, nn

from distmuon.launch import World
from distmuon.models.networks import MLP
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.overlap import OVERLAPS, OverlappedMuon, PipelinedMuon, Publishing, Worked
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.collectives import PendingWork
from distmuon.sharding.grid import Grid
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.memory_tracker import StorageTracker

CASES: dict[str, Case] = {
    "ragged": RAGGED,
    "bf16 and fp32": SMALL.of_dtype(torch.bfloat16, torch.float32),
    "absent": ABSENT,
    "one element": TINY,
    "one bucket": Case(SMALL.weights, bucket_size=10_000),
}
VARIANTS: dict[str, dict[str, Any]] = {  # of distributed Muon
    "gather_all": {},
    "owner": {"strategy": "owner"},
    "updates": {"strategy": "owner", "publish": "updates"},
    "periodic": {"strategy": "periodic", "strategy_options": {"whole_every": 2}},
    "blockwise": {"strategy": "blockwise", "publish": "updates"},
}
PAIRS = [("gather_all", name) for name in CASES] + [
    (variant, "absent") for variant in VARIANTS if variant != "gather_all"
]


def schedule_facts(world: World) -> dict[str, Any]:
    grid = Grid.of(world)
    return {
        "outcomes": {(variant, name): train_all(CASES[name], grid, **VARIANTS[variant]) for variant, name in PAIRS},
        "straddling": straddling(grid),
        "memory": {name: memory(grid, name) for name in OVERLAPS},
        "trouble": {name: meet_trouble(grid, name) for name in ("naive", "pipelined")},
    }


def train_all(
    case: Case, grid: Grid, schedules: Mapping[str, type] = OVERLAPS, **options: Any
) -> dict[str, dict[str, Any]]:
    """Train in all schedules; return parameters, state, ledger and what torch dispatched, of each."""
    found = {}
    for name, schedule in schedules.items():
        parameters, optimizer = build(case, grid, schedule, **options)
        grid.ledger.clear()
        with CollectiveCounter() as counter:
            for step in range(case.steps):
                give(case, grid, parameters, step)
                optimizer.step()
        rows = dict(grid.ledger)
        found[name] = {
            "values": values(parameters),
            "momentum": {n: optimizer.state[p].get("momentum_buffer") for n, p in parameters.items()},
            "ledger": rows,
            "dispatched": counter.ledger.total().calls,
            "left": len(getattr(optimizer, "pending", [])),
        }
    return found


def scheduled(case: Case, grid: Grid, name: str) -> tuple[dict[str, nn.Parameter], OverlappedMuon]:
    parameters, optimizer = build(case, grid, OVERLAPS[name])
    assert isinstance(optimizer, OverlappedMuon)
    return parameters, optimizer


def straddling(grid: Grid) -> int:
    layout = build(SMALL, grid)[1].buffers.layout
    return sum(len(layout.owners(b, i)) > 1 for b in layout.buckets for i in b.params)


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


def meet_trouble(grid: Grid, name: str) -> dict[str, Any]:
    """Let Newton–Schulz fail on every rank in the second bucket group; say what is left, and if the next step works."""
    case = Case(tuple(Weight(f"w{i}", (4, 6), 0) for i in range(6)), (MUON,), steps=1, bucket_size=24)
    parameters, optimizer = scheduled(case, grid, name)
    honest, calls = optimizer.strategy.newton_schulz, [0]
    landed: list[Any] = []

    def fails(matrices: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            landed.extend(work for pending in optimizer.pending for work, *_ in pending._started)
            raise Trouble("the second bucket group")
        return honest(matrices)

    optimizer.strategy.newton_schulz = fails  # type: ignore[method-assign]
    give(case, grid, parameters, 0)
    words = ""
    try:
        optimizer.step()
    except Trouble as error:
        words = str(error)
    left, mode = len(optimizer.pending), grid.dp._pending
    optimizer.strategy.newton_schulz = honest  # type: ignore[method-assign]
    optimizer.zero_grad()
    give(case, grid, parameters, 0)
    optimizer.step()
    return {
        "words": words,
        "under way": len(landed),
        "completed": all(work.is_completed() for work in landed),
        "left": left,
        "mode": mode,
        "goes on": all(torch.isfinite(value).all() for value in values(parameters).values()),
    }


def last_rank_fails(world: World) -> None:
    """Let Newton–Schulz fail on the last rank alone, with gathers under way everywhere."""
    grid = Grid.of(world)
    case = Case(tuple(Weight(f"w{i}", (4, 6), None) for i in range(6)), (MUON,), steps=1, bucket_size=24)
    parameters, optimizer = scheduled(case, grid, "pipelined")
    if world.rank == world.size - 1:

        def fails(matrices: Any) -> Any:
            raise Trouble("on the last rank")

        optimizer.strategy.newton_schulz = fails  # type: ignore[method-assign]
    give(case, grid, parameters, 0)
    optimizer.step()


# ---- A wire that is late ----------------------------------------------------------------------------------


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


MUTANTS = {  # -> the variant of Muon in which it reads what is not there
    ReadsGathersEarly: ("gather_all", "owner"),
    ReadsReturnsEarly: ("owner", "updates"),
    ReadsUpdatesEarly: ("updates", "blockwise"),
}


def late_facts(world: World) -> dict[str, Any]:
    """Return what all schedules make of a late wire, and mutants: whether all ends as on an honest one."""
    grid, found, mutants = Grid.of(world), {}, {}
    for variant, options in VARIANTS.items():
        expected = train_all(SMALL, grid, {"": DistributedMuon}, **options)[""]["values"]
        with late_wire():
            late = train_all(SMALL, grid, **options)
        found[variant] = all(equal(one["values"], expected) for one in late.values())
        for mutant in (mutant for mutant, variants in MUTANTS.items() if variant in variants):
            with late_wire():
                late = train_all(SMALL, grid, {"": mutant}, **options)
            mutants[mutant.__name__, variant] = equal(late[""]["values"], expected)
    return {"equal": found, "mutants": mutants}


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())
