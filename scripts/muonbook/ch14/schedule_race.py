"""What the three schedules cost: the same steps in turn, end to end, and what their traces show.

Every schedule gets the same weights and the same made-up gradients, so that all must end with the same parameters, bit
for bit. Timed is the optimizer's step alone, from one meeting of all ranks to the next.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.overlap import OVERLAPS
from distmuon.optim.param_groups import groups_for
from distmuon.sharding.grid import Grid
from distmuon.verify.memory_tracker import StorageTracker
from muonbook.ch14 import recording
from muonbook.ch14.single_thread_gloo import one_at_a_time
from muonbook.measure import interleaved_timing, results, trace, trace_report
from muonbook.measure.baselines import SAME_EVERYWHERE, sliced_model
from muonbook.measure.workload import Workload

TRIALS = 3  # steps in which it is seen how long Newton–Schulz takes


class ScheduledModel:
    """A model of its own on this rank, and one schedule that updates it. options: of distributed Muon."""

    def __init__(self, workload: Workload, grid: Grid, schedule: str, **options: Any) -> None:
        self.model: nn.Module = sliced_model(workload, grid)
        options = dict(bucket_size=workload.bucket_size, lr=workload.lr) | options
        self.optimizer: DistributedMuon = OVERLAPS[schedule](groups_for(self.model, "muon"), grid, **options)
        self.grid, self.generator = grid, torch.Generator().manual_seed(grid.world.rank)

    def feed(self) -> None:
        """Give every parameter the next made-up gradient; ranks differ, schedules do not. Then wait for all ranks."""
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=self.generator).to(parameter)
        self.meet()

    def step(self) -> None:
        """Take the optimizer's step, until the last rank has ended it."""
        self.optimizer.step()
        self.meet()

    def meet(self) -> None:
        """Wait for all ranks, and for what their GPUs have been asked; unrecorded."""
        if self.grid.device.type == "cuda":
            torch.cuda.synchronize()
        if self.grid.world.size > 1:
            torch.distributed.barrier()


class SimulatedCompute:
    """Newton–Schulz that takes as long as ever and needs no core.

    Called, it works and notes how long that takes, per wave; `asleep` sleeps for the median of those times and returns
    the matrices as they are, for they have the sizes of updates.
    """

    def __init__(self, work: Callable[[Mapping[int, Tensor]], dict[int, Tensor]]) -> None:
        self.work, self.taken = work, dict[tuple[int, ...], list[float]]()

    def __call__(self, matrices: Mapping[int, Tensor]) -> dict[int, Tensor]:
        start = time.perf_counter()
        updates = self.work(matrices)
        self.taken.setdefault(tuple(matrices), []).append(time.perf_counter() - start)
        return updates

    def asleep(self, matrices: Mapping[int, Tensor]) -> dict[int, Tensor]:
        with record_function("newton_schulz"):  # a trace shows it where the work would be
            time.sleep(statistics.median(self.taken[tuple(matrices)]))
        return dict(matrices)


def simulate(models: Mapping[str, ScheduledModel]) -> None:
    """Let all schedules sleep instead of orthogonalizing, as long as a synchronous step takes for it. Collective."""
    timed = models["synchronous"].optimizer.strategy
    nap = timed.newton_schulz = SimulatedCompute(timed.newton_schulz)  # type: ignore[method-assign]
    for model in models.values():  # all of them, so that they stay alike
        for _ in range(TRIALS):
            model.feed()
            model.step()
    for model in models.values():
        model.optimizer.strategy.newton_schulz = nap.asleep  # type: ignore[method-assign]


def race(world: World, workload: Workload, rounds: int, recordings: int, asleep: bool = False) -> dict[str, Any] | None:
    """Let the schedules take turns, one collective at a time; on rank 0, return ratios to the synchronous one, and what
    was recorded.

    rounds: timed ones, after one that warms up. recordings: one-step traces of each, taken after the race. asleep: all
    `simulate`, so that no collective shares a core with the work, and parameters are good for nothing.
    """
    with one_at_a_time():
        grid = Grid.of(world)
    models = {name: ScheduledModel(workload, grid, name) for name in OVERLAPS}
    if asleep:
        simulate(models)
    steps = {name: model.step for name, model in models.items()}
    seconds = interleaved_timing.take_turns(steps, rounds, before=lambda name: models[name].feed())
    equal = all(alike(models["synchronous"].model, other.model) for other in models.values())
    shown = [{name: record(world, model) for name, model in models.items()} for _ in range(recordings)]
    everywhere = world.gather(equal)
    if everywhere is None:
        return None
    found: dict[str, Any] = {
        "waves": len(models["naive"].optimizer.strategy.bucket_groups()),
        "equal_parameters": all(everywhere),
        "milliseconds": {name: 1e3 * median for name, median in interleaved_timing.medians(seconds).items()},
        "ratio_to_synchronous": {
            name: results.spread(interleaved_timing.ratios(taken, seconds["synchronous"]))
            for name, taken in seconds.items()
        },
    }
    if recordings:
        found["recorded"] = {name: read([one[name] for one in shown]) for name in models}
        found["traces"] = {name: of_median_span([one[name] for one in shown]) for name in models}
    return found


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Say whether two models have the same parameters, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def record(world: World, model: ScheduledModel) -> dict[str, Any]:
    """Return a merged trace of one step; {} on other ranks than 0. Collective."""
    model.feed()
    everyone = world.gather(recording.record(world, model.optimizer.step, 1, model.grid))
    return {} if everyone is None else recording.merge(everyone)


def of_median_span(recorded: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the recording whose step took as long as the median one; of an even number, the longer of the middle."""
    return sorted(recorded, key=recording.span)[len(recorded) // 2]


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
        row["hideable"] = sum(map(hideable, ranks)) / len(ranks)
        row["waiting"] = sum(sum(meeting.waiting.values()) for meeting in met) / len(ranks)
        rows.append(row)
    return {name: round(results.spread([row[name] for row in rows])["median"], 3) for name in rows[0]}


def hideable(rank: trace.RankTrace) -> float:
    """Return how long a rank was in collectives from Muon's first move on, which is when one can hide: ms."""
    begin = min(activity.start for activity in rank.ranges if activity.name == "momentum")
    sending = (collective.when.interval for collective in rank.collectives)
    return trace_report.MS * trace_report.length(trace_report.intersection(sending, [(begin, math.inf)]))


def compare(
    world: World, workload: Workload, options: Mapping[str, Any] = MappingProxyType({})
) -> list[dict[str, Any]] | None:
    """Take two steps in all schedules; on rank 0, return per rank and schedule whether the parameters are those of the
    synchronous one, and the calls, bytes sent and peak memory of the second step."""
    grid, found = Grid.of(world), dict[str, Any]()
    models = {name: ScheduledModel(workload, grid, name, **options, **SAME_EVERYWHERE) for name in OVERLAPS}
    for name, model in models.items():
        for _ in range(2):
            model.feed()
            grid.ledger.clear()
            with StorageTracker() as tracker:
                model.step()
        total = grid.ledger.total()
        equal = alike(models["synchronous"].model, model.model)
        found[name] = {"equal": equal, "calls": total.calls, "bytes": total.sent_bytes, "peak": tracker.peak}
    return world.gather(found)
