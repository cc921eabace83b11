"""What the three schedules cost: the same steps in turn, end to end, and what their traces show.

Every schedule gets the same weights and the same made-up gradients, so that all must end with the same parameters, to
the bit. Timed is the optimizer's step alone, from one meeting of all ranks to the next. In one round each schedule
takes one step, in an order of its own; ratios are taken within the round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.routing import split_parameters
from distmuon.optim.schedules import SCHEDULES
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from muonbook.ch14 import tracing
from muonbook.measure import results, trace, trace_report
from muonbook.measure.baselines import sliced_model
from muonbook.measure.workload import Workload

RECORDS = 20_000  # ledger entries per round, to time one


class Racer:
    """One schedule with a model of its own on this rank."""

    def __init__(self, workload: Workload, grid: Grid, schedule: str) -> None:
        self.model: nn.Module = sliced_model(workload, grid)
        options: dict[str, Any] = dict(bucket_size=workload.bucket_size, lr=workload.lr)
        self.optimizer: DistributedMuon = SCHEDULES[schedule](split_parameters(self.model), grid, **options)
        self.grid, self.generator = grid, torch.Generator().manual_seed(grid.world.rank)

    def feed(self) -> None:
        """Give every parameter the next made-up gradient; ranks differ, schedules do not."""
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=self.generator).to(parameter.dtype)
        self.optimizer.accumulator.collect_all()

    def step(self) -> float:
        """Return the seconds of one optimizer step, from all ranks' start to the last one's end."""
        self.feed()
        meet(self.grid)
        began = time.perf_counter()
        self.optimizer.step()
        meet(self.grid)
        return time.perf_counter() - began


def meet(grid: Grid) -> None:
    """Wait for all ranks, unrecorded."""
    if grid.world.size > 1:
        torch.distributed.barrier()


def race(world: World, workload: Workload, rounds: int, recordings: int) -> dict[str, Any] | None:
    """Let the schedules take turns; on rank 0, return ratios to the synchronous one, and what was recorded.

    rounds: timed ones, after one that warms up. recordings: one-step traces of each, taken after the race.
    """
    grid = Grid.of(world)
    racers = {name: Racer(workload, grid, name) for name in SCHEDULES}
    seconds: dict[str, list[float]] = {name: [] for name in racers}
    for number in range(rounds + 1):
        for name in results.shuffled(racers, number):
            taken = racers[name].step()
            if number:
                seconds[name].append(taken)
    equal = all(alike(racers["synchronous"].model, racer.model) for racer in racers.values())
    shown = [{name: record(world, racer) for name, racer in racers.items()} for _ in range(recordings)]
    everywhere = world.gather(equal)
    if everywhere is None:
        return None
    found: dict[str, Any] = {
        "waves": len(racers["naive"].optimizer.strategy.bucket_groups()),
        "equal_parameters": all(everywhere),
        "milliseconds": {name: 1e3 * results.spread(taken)["median"] for name, taken in seconds.items()},
        "ratio_to_synchronous": {name: ratio(taken, seconds["synchronous"]) for name, taken in seconds.items()},
    }
    if recordings:
        found["recorded"] = {name: read([one[name] for one in shown]) for name in racers}
        found["traces"] = shown[0]
    return found


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    return results.spread([one / other for one, other in zip(mine, theirs, strict=True)])


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Say whether two models have the same parameters, to the bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def record(world: World, racer: Racer) -> dict[str, Any]:
    """Return a merged trace of one step; {} on other ranks than 0. Collective."""
    racer.feed()
    mine = tracing.record(world, racer.optimizer.step, 1, racer.optimizer)
    everyone = world.gather(mine)
    return {} if everyone is None else tracing.merge(everyone)


def read(recorded: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, over recordings of one schedule, of what a rank did in a step: means over ranks, milliseconds."""
    rows: list[dict[str, float]] = []
    for one in recorded:
        ranks = trace.parse(one)
        met = trace_report.meetings(ranks)
        summaries = [trace_report.summarize(rank) for rank in ranks]
        row = {
            name: sum(getattr(summary, name) for summary in summaries) / len(ranks)
            for name in ("collectives", "communication_sum", "communication", "computation", "overlap", "span")
        }
        row["waiting"] = sum(sum(meeting.waiting.values()) for meeting in met) / len(ranks)
        rows.append(row)
    return {name: round(results.spread([row[name] for row in rows])["median"], 3) for name in rows[0]}


# ---- What the ledger itself costs -------------------------------------------------------------------------


def ledger_overhead(world: World, workload: Workload, rounds: int) -> dict[str, Any] | None:
    """Return what recording costs: one entry times the entries of a step, and steps with and without."""
    grid = Grid.of(world)
    racer = Racer(workload, grid, "synchronous")
    racer.step()
    grid.ledger.clear()
    racer.step()
    calls = grid.ledger.total().calls
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(rounds):
        for name in results.shuffled(seconds, number):
            with muted(grid.ledger, name == "without"):
                seconds[name].append(racer.step())
    entry = results.spread([_entry_seconds() for _ in range(5)])
    if world.rank:
        return None
    step = results.spread(seconds["with"])["median"]
    return {
        "calls_per_step": calls,
        "microseconds_per_call": 1e6 * entry["median"],
        "share_of_step": calls * entry["median"] / step,
        "with_to_without": ratio(seconds["with"], seconds["without"]),
    }


@contextmanager
def muted(ledger: Ledger, silent: bool) -> Iterator[None]:
    """Let the ledger, inside the block, forget what it is told, if `silent`."""
    if silent:
        ledger.record = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        vars(ledger).pop("record", None)


def _entry_seconds() -> float:
    ledger = Ledger()
    began = time.perf_counter()
    for number in range(RECORDS):
        ledger.record("all_gather", "dp", 4, 1 << 20, "momentum, buffer 0 bucket 1" if number % 2 else "parameters")
    return (time.perf_counter() - began) / RECORDS
