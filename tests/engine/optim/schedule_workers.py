"""What every rank of a grid finds out about the three schedules of a step: one world, many facts."""

from __future__ import annotations

from typing import Any

import torch
from optimizer_cases import ABSENT, MUON, RAGGED, SMALL, TINY, Case, Weight, build, cut, give, values, whole_start
from torch import nn

from distmuon.launch import World
from distmuon.models.networks import MLP
from distmuon.optim.routing import split_parameters
from distmuon.optim.schedules import SCHEDULES
from distmuon.sharding.buffers import dtype_name
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import mark
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.prediction import more_transient, predict_transient
from distmuon.verify.storage_tracker import StorageTracker

CASES: dict[str, Case] = {
    "small": SMALL,
    "ragged": RAGGED,
    "bf16 and fp32": SMALL.of_dtype(torch.bfloat16, torch.float32),
    "absent": ABSENT,
    "one element": TINY,
    "one bucket": Case(SMALL.weights, bucket_size=10_000),
}


class Trouble(Exception):
    """What a test throws into a step."""


def schedule_facts(world: World) -> dict[str, Any]:
    grid = Grid.of(world)
    return {
        "outcomes": {name: train_all(case, grid) for name, case in CASES.items()},
        "straddling": straddling(grid),
        "memory": {name: memory(grid, name) for name in SCHEDULES},
        "trouble": {name: meet_trouble(grid, name) for name in ("naive", "pipelined")},
    }


def train_all(case: Case, grid: Grid) -> dict[str, Any]:
    """Train in all three schedules; return parameters, state, ledger and what torch dispatched, of each."""
    found = {}
    for name, schedule in SCHEDULES.items():
        parameters, optimizer = make(case, grid, schedule)
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


def make(case: Case, grid: Grid, schedule: type) -> tuple[dict[str, nn.Parameter], Any]:
    """As `optimizer_cases.build`, with the optimizer that makes its steps in this schedule."""
    parameters = {
        w.name: mark(nn.Parameter(cut(whole_start(w, grid.tp.size), w.dim, grid.tp.size, grid.tp.rank)), w.dim)
        for w in case.weights
    }
    groups = [
        group | {"params": [(w.name, parameters[w.name]) for w in case.weights if w.group == i]}
        for i, group in enumerate(case.groups)
    ]
    return parameters, schedule(groups, grid, bucket_size=case.bucket_size, batched=False)


def straddling(grid: Grid) -> int:
    layout = build(SMALL, grid)[1].buffers.layout
    return sum(len(layout.owners(b, i)) > 1 for b in layout.buckets for i in b.params)


def memory(grid: Grid, name: str) -> tuple[int, int]:
    """Return (peak bytes of the second step, their bound) for a deep MLP in many buckets."""
    model = MLP([64, *[128] * 12, 10], grid.tp)
    optimizer = SCHEDULES[name](split_parameters(model), grid, bucket_size=10_000)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        with StorageTracker() as tracker:
            optimizer.step()
    layout, muon = optimizer.buffers.layout, list(optimizer.muon)
    bound = predict_transient(layout, grid.tp.size, grid.dp.rank, muon, compute_dtype=compute_dtype(grid))
    return tracker.peak, bound + more_transient(name, layout, muon)


def compute_dtype(grid: Grid) -> str:
    from distmuon.optim.newton_schulz import fast_dtype

    return dtype_name(fast_dtype(grid.device, torch.bfloat16))


def meet_trouble(grid: Grid, name: str) -> dict[str, Any]:
    """Let Newton–Schulz fail on every rank in the second bucket group; say what is left, and if the next step works."""
    case = Case(tuple(Weight(f"w{i}", (4, 6), 0) for i in range(6)), (MUON,), steps=1, bucket_size=24)
    parameters, optimizer = make(case, grid, SCHEDULES[name])
    honest, calls = optimizer.strategy.newton_schulz, [0]
    landed: list[Any] = []

    def fails(matrices: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            landed.extend(work for pending in optimizer.pending for work, _ in pending._started)
            raise Trouble("the second bucket group")
        return honest(matrices)

    optimizer.strategy.newton_schulz = fails
    give(case, grid, parameters, 0)
    words = ""
    try:
        optimizer.step()
    except Trouble as error:
        words = str(error)
    left, mode = len(optimizer.pending), grid.dp._pending
    optimizer.strategy.newton_schulz = honest
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
    parameters, optimizer = make(case, grid, SCHEDULES["pipelined"])
    if world.rank == world.size - 1:

        def fails(matrices: Any) -> Any:
            raise Trouble("on the last rank")

        optimizer.strategy.newton_schulz = fails
    give(case, grid, parameters, 0)
    optimizer.step()


def start_and_read_later(world: World) -> dict[str, Any]:
    """Start gathers out of step with each other, and wait for them in one go."""
    grid = Grid.of(world)
    group: Group = grid.world
    shards = [torch.full((3,), float(10 * world.rank + i)) for i in range(4)]
    with group.starting() as pending:
        found = [group.all_gather(shard, f"shard {i}") for i, shard in enumerate(shards)]
        with group.starting() as inner:
            nested = group.all_gather(shards[0], "nested")
        assert len(inner) == 1
        inner.wait()
    assert len(pending) == 4
    pending.wait()
    after = group.all_gather(shards[1], "after the block")  # waits again
    return {
        "found": [tensor.view(world.size, 3)[:, 0].tolist() for tensor in found],
        "nested": nested.view(world.size, 3)[:, 0].tolist(),
        "after": after.view(world.size, 3)[:, 0].tolist(),
        "left": len(pending) + len(inner),
        "calls": grid.ledger.total().calls,
    }
