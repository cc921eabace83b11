"""What chapter 14's ranks do: recorded steps, races of schedules, of hidden communication and of gathers.

In a race all take turns in one run (`interleaved_timing`), and ratios are stored. Every schedule gets the same weights
and the same made-up gradients, so that all must end with the same parameters, bit for bit. Timed is the optimizer's
step alone, from one meeting of all ranks to the next; where gradients and parameters travel under the passes, whole
training steps, several in a row, because what one of them has started arrives in the next.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo, distributed_c10d
from torch.profiler import record_function

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.overlap import OVERLAPS
from distmuon.optim.param_groups import groups_for
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.memory_tracker import StorageTracker
from muonbook import baselines
from muonbook.ch14 import recording
from muonbook.measure import interleaved_timing, results, trace, trace_report, trainers
from muonbook.measure.coalescing import compare_blocks, compare_shards
from muonbook.measure.trainers import SAME_EVERYWHERE, Trainer, sliced_model
from muonbook.measure.workload import SHAPES, Workload, batches, pixels

# ---- One collective after the other, as NCCL carries them out -----------------------------------------------

# gloo keeps two threads per group and takes on two collectives at once. A clock cannot tell what a schedule gains by
# that from what it gains by hiding work; so the races do without. torch has no public way to ask gloo for one thread.


class OneLane(ProcessGroupGloo):
    """gloo's group with one thread, on the interfaces that gloo would take."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = timeout, 1
        named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        devices = [ProcessGroupGloo.create_device(interface=name) for name in named]
        options._devices = devices or [ProcessGroupGloo.create_default_device()]
        super().__init__(store, rank, size, options)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Inside the block, every new group of gloo's is a `OneLane`."""
    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", OneLane):
        yield


# ---- A training step of AdamW and one of Muon, recorded -----------------------------------------------------

MAKERS: dict[str, Callable[[Workload, Grid], Trainer]] = {  # by the names that their traces bear
    "adamw": trainers.make_zero1,
    "muon": trainers.make_muon,
}


class RecordedStep(NamedTuple):
    """A training step as all ranks recorded it. trace: merged. ledgers: of the ranks, in their order."""

    trace: dict[str, Any]
    ledgers: list[Ledger]


def record_steps(world: World, recordings: int = 1) -> dict[str, RecordedStep] | None:
    """Train each of MAKERS from the same weights on the same data, every step after the first under the profiler.

    On rank 0, return by name the quickest of so many `recordings`, which is the one that was disturbed least.
    """
    workload, grid = SHAPES["even"].shared_by(world.dp), Grid.of(world)
    corpus, found = pixels(grid, workload.context), dict[str, RecordedStep]()
    for name, make in MAKERS.items():
        data = batches(workload, corpus, grid.dp.size, grid.dp.rank)
        trainer = make(workload, grid)
        trainer.step(next(data))
        steps = [_record_step(world, grid, partial(trainer.step, next(data))) for _ in range(recordings)]
        if whole := [step for step in steps if step is not None]:
            found[name] = quickest(whole)
    return found or None


def _record_step(world: World, grid: Grid, step: Callable[[], Any]) -> RecordedStep | None:
    """Return one step as all ranks recorded it, on rank 0. Collective."""
    grid.ledger.clear()
    traces = world.gather(recording.record(world, step, 1, grid))
    ledgers = world.gather(copy.deepcopy(grid.ledger))
    return None if traces is None or ledgers is None else RecordedStep(recording.merge(traces), ledgers)


def quickest(steps: Sequence[RecordedStep]) -> RecordedStep:
    """Return the step that took the least time."""
    return min(steps, key=lambda step: recording.span(step.trace))


TITLES = {"adamw": baselines.TITLES["zero1"], "muon": f"Muon, {baselines.TITLES['muon']}"}


def report_steps(recorded: Mapping[str, RecordedStep], folder: str | None) -> tuple[bool, None]:
    """Print what the traces hold, each collective once; all is well if they hold what the ledgers do.

    folder: where each optimizer's trace is written to a file of its own; None: nowhere.
    """
    agreed = [_report_step(name, *step) for name, step in recorded.items()]
    print(f"Traces = ledgers, labels and bytes included: {all(agreed)}")
    for name, step in recorded.items() if folder else ():
        trace.save(step.trace | results.made_by(), Path(folder or "") / f"step_{name}.json.gz")
    return all(agreed), None


def _report_step(name: str, merged: dict[str, Any], ledgers: Sequence[Ledger]) -> bool:
    """Print how many collectives each rank's trace holds; return whether they are those that its ledger counted."""
    ranks, agreed = trace.parse(merged), list[bool]()
    print(f"{TITLES[name]}, collectives by rank: {', '.join(str(len(rank.collectives)) for rank in ranks)}")
    for rank, ledger in zip(ranks, ledgers, strict=True):
        traced = [(c.name, c.label, c.bytes) for c in rank.collectives]
        told = [(e.group, e.label, t.payload_bytes // t.calls) for e, t in ledger for _ in range(t.calls)]
        agreed.append(sorted(traced, key=str) == sorted(told, key=str))
    return all(agreed)


# ---- Three schedules of Muon's step -------------------------------------------------------------------------

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


def race_schedules(
    world: World, workload: Workload, rounds: int, recordings: int, asleep: bool = False
) -> dict[str, Any] | None:
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
    shown = [{name: record_schedule(world, model) for name, model in models.items()} for _ in range(recordings)]
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
        found["recorded"] = {name: medians_of([one[name] for one in shown]) for name in models}
        found["traces"] = {name: of_median_span([one[name] for one in shown]) for name in models}
    return found


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Say whether two models have the same parameters, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def record_schedule(world: World, model: ScheduledModel) -> dict[str, Any]:
    """Return a merged trace of one step; {} on other ranks than 0. Collective."""
    model.feed()
    everyone = world.gather(recording.record(world, model.optimizer.step, 1, model.grid))
    return {} if everyone is None else recording.merge(everyone)


def of_median_span(recorded: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the recording whose step took as long as the median one; of an even number, the longer of the middle."""
    return sorted(recorded, key=recording.span)[len(recorded) // 2]


def medians_of(recorded: Sequence[dict[str, Any]]) -> dict[str, Any]:
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


def compare_schedules(world: World, workload: Workload) -> list[dict[str, Any]] | None:
    """Take two steps in all schedules; on rank 0, return per rank and schedule whether the parameters are those of the
    synchronous one, and the calls, bytes sent and peak memory of the second step."""
    grid, found = Grid.of(world), dict[str, Any]()
    models = {name: ScheduledModel(workload, grid, name, **SAME_EVERYWHERE) for name in OVERLAPS}
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


def report_schedules(ranks: Sequence[Mapping[str, Any]]) -> tuple[bool, None]:
    """Print the comparison; all is well if all schedules did the same."""
    names = list(ranks[0])
    print("rank 0, one step    calls   bytes sent    update's peak")
    for name in names:
        row = ranks[0][name]
        more = row["peak"] / ranks[0]["synchronous"]["peak"]
        print(f"  {name:<18}{row['calls']:>5}{row['bytes']:>13,}{more:>15.2f} x")
    same = all(
        rank[name]["equal"] and all(rank[name][key] == rank["synchronous"][key] for key in ("calls", "bytes"))
        for rank in ranks
        for name in names
    )
    print(f"On every rank same parameters, same calls, same bytes: {same}")
    return same, None


# ---- Gradients under the backward pass, parameters under the next forward pass ------------------------------

TURN = 3  # in a turn of the race, and in a comparison
OPTIMIZERS: dict[str, Callable[..., ShardedOptimizer]] = {
    "adamw": Zero1AdamW,
    "muon": partial(DistributedMuon, strategy="owner"),
}
HIDDEN = {"nothing": (False, False), "gradients": (True, False), "both": (True, True)}  # under backward, under forward


class HidingTrainer(Trainer):
    """A trainer that sends gradients while the backward pass goes on."""

    @property
    def optimizer(self) -> ShardedOptimizer:
        (found,) = self.optimizers
        assert isinstance(found, ShardedOptimizer)
        return found

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.optimizer.overlap_backward():
            return super().forward_backward(inputs, targets)


def make(workload: Workload, grid: Grid, name: str, hidden: str, **options: Any) -> Trainer:
    """Return one of OPTIMIZERS at work, hiding what HIDDEN says."""
    backward, forward = HIDDEN[hidden]
    model = sliced_model(workload, grid)
    options |= workload.hyperparameters | {"bucket_size": workload.bucket_size, "overlap_forward": forward}
    optimizer = OPTIMIZERS[name](groups_for(model, name), grid, **options)
    return (HidingTrainer if backward else Trainer)(model, [optimizer])


def compare_hiding(world: World, workload: Workload) -> list[dict[str, Any]] | None:
    """Train Muon with nothing and with both hidden; on rank 0, return per rank what was under way when, and whether
    parameters and bytes are the same."""
    grid = Grid.of(world)
    batch = next(batches(workload, pixels(grid, workload.context), world.dp, grid.dp.rank))
    plain, hiding = (make(workload, grid, "muon", hidden, **SAME_EVERYWHERE) for hidden in ("nothing", "both"))
    assert isinstance(hiding, HidingTrainer)
    embedding: Any = hiding.model.tokens  # the first layer: its gradients come last
    sent, arriving = list[int](), list[int]()
    embedding.weight.register_post_accumulate_grad_hook(
        lambda _: sent.append(len(hiding.optimizer.buckets) - len(hiding.optimizer.waiting_buckets))
    )
    ledgers = []
    for trainer in (plain, hiding):
        grid.ledger.clear()
        for _ in range(TURN):
            trainer.step(batch)
            if trainer is hiding:
                arriving.append(len(hiding.optimizer.arriving_buckets))
        ledgers.append({row: total for row, total in grid.ledger if row.label != "order of the buckets"})
    return world.gather(
        {
            "buckets": len(hiding.optimizer.buckets),
            "sent": sent,
            "arriving": arriving,
            "equal": alike(plain.model, hiding.model),
            "same bytes": ledgers[0] == ledgers[1],
        }
    )


def report_hiding(ranks: Sequence[Mapping[str, Any]]) -> tuple[bool, None]:
    """Print what was under way when; all is well if hiding changed nothing."""
    buckets = ranks[0]["buckets"]
    title = f"rank 0 of {len(ranks)}, {buckets} buckets"
    print(f"{title:<44}" + "".join(f"  step {step}" for step, _ in enumerate(ranks[0]["sent"], 1)))
    rows = {"gradients sent when the first layer's come": "sent", "parameters under way after step": "arriving"}
    for title, key in rows.items():
        print(f"  {title:<42}" + "".join(f"{count:>8}" for count in ranks[0][key]))
    same = all(rank["equal"] and rank["same bytes"] for rank in ranks)
    print(f"On every rank same parameters, same bytes: {same}")
    return same, None


def race_hiding(world: World, workload: Workload, rounds: int) -> dict[str, Any] | None:
    """Let all take turns, one collective at a time; on rank 0, return per optimizer and what it hides the ratio to the
    same with nothing hidden."""
    with one_at_a_time():
        grid = Grid.of(world)
    batch = next(batches(workload, pixels(grid, workload.context), world.dp, grid.dp.rank))
    trainers = {f"{name}, {hidden}": make(workload, grid, name, hidden) for name in OPTIMIZERS for hidden in HIDDEN}

    def turn(trainer: Trainer) -> None:
        for _ in range(TURN):
            trainer.step(batch)
        for optimizer in trainer.optimizers:
            assert isinstance(optimizer, ShardedOptimizer)
            optimizer.wait_for_parameters()
        dist.barrier()

    acts = {key: partial(turn, trainer) for key, trainer in trainers.items()}
    seconds = interleaved_timing.take_turns(acts, rounds, before=lambda _: dist.barrier())
    pairs = [(f"{name}, nothing", f"{name}, {hidden}") for name in OPTIMIZERS for hidden in HIDDEN]
    equal = all(alike(trainers[one].model, trainers[other].model) for one, other in pairs)
    everywhere = world.gather((equal, seconds))
    if everywhere is None:
        return None
    slowest = {key: [max(times) for times in zip(*(s[key] for _, s in everywhere), strict=True)] for key in trainers}

    def ratio(name: str, hidden: str) -> dict[str, Any]:
        return results.spread(interleaved_timing.ratios(slowest[f"{name}, {hidden}"], slowest[f"{name}, nothing"]))

    return {
        "equal_parameters": all(equal for equal, _ in everywhere),
        "ratio_to_nothing_hidden": {name: {hidden: ratio(name, hidden) for hidden in HIDDEN} for name in OPTIMIZERS},
    }


# ---- One bucket against a call per matrix, over DP and over TP ----------------------------------------------

MATRICES = 12  # bf16
WIDTHS = (32, 64, 128, 256, 512, 1024)  # the largest bucket has 25 MB
CUTS = {"rows": 0, "columns": 1}  # dimension that is cut over TP


def race_gathers(world: World, rounds: int) -> dict[str, Any] | None:
    """Gather in both ways, every width; on rank 0, return {"rows": {width: spread of ratios}, ...}; over DP: "shards".

    Raises ValueError where a way gave wrong matrices.
    """
    grid, found = Grid.of(world), dict[str, Any]()
    for width in WIDTHS:
        if grid.tp.size == 1:
            rows = {"shards": compare_shards(grid, MATRICES, width, rounds)}
        else:
            rows = {name: compare_blocks(grid, MATRICES, width, dim, rounds) for name, dim in CUTS.items()}
        for name, times in rows.items():
            if not times.right:
                raise ValueError(f"{name} of {width} x {width}: the gathered matrices are wrong.")
            found.setdefault(name, {})[str(width)] = results.spread(times.ratios)
    return None if world.rank else found


# ---- What is stored -----------------------------------------------------------------------------------------


class LinkRace(NamedTuple):
    """Schedules raced over one link, and what a model needs to tell how it ends.

    work, sending: of one bucket, in a recorded synchronous step; rest: of that step, all else. Milliseconds.
    asleep, at_work: schedule -> its step over the synchronous one, median; of ranks that sleep in place of the work,
    and of ranks that do it.
    """

    buckets: int
    work: float
    sending: float
    rest: float
    asleep: dict[str, float]
    at_work: dict[str, float]


def stored_races() -> dict[str, LinkRace]:
    """Return the races of book/results/traces.json, by link: Mbit/s, and "no limit"."""
    found, races = results.load("traces"), dict[str, LinkRace]()
    working, sleeping = (found[f"links{how}"] | {"no limit": found[f"loopback{how}"]} for how in ("", "_asleep"))
    for link, race in working.items():
        step, buckets = race["recorded"]["synchronous"], race["waves"]
        work, sending = step["computation"], step["hideable"]
        asleep, at_work = (
            {name: ratio["median"] for name, ratio in one["ratio_to_synchronous"].items()}
            for one in (sleeping[link], race)
        )
        rest = step["span"] - work - sending
        races[link] = LinkRace(buckets, work / buckets, sending / buckets, rest, asleep, at_work)
    return races
