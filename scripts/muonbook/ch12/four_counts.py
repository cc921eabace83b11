"""Count a training step on one level of the machine after the other, on every grid up to eight ranks.

    predicted     from the map and the model's description, before any process exists
    ledger        rows written by our own collectives as they are called
    dispatched    what torch's dispatcher sees being called, whoever calls it     (counter.CollectiveCounter)
    recorded      what torch.profiler writes into a trace                         (profiler.count_once)

Calls and payload are counted anew on every level; bytes *sent* follow from them by one ring formula
(`ledger.ring_bytes`), which only the operating system can check: `byte_counts.wire_on`.

Functions that take a `world` run on every rank; `counts_on` starts worlds.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from distmuon import launch
from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import NOTHING, Ledger, Traffic
from distmuon.verify.counter import CollectiveCounter
from muonbook.measure.profiler import Seen, profiled, seen
from muonbook.measure.trainers import Trainer
from muonbook.measure.workload import SHAPES, Workload, batches, pixels
from muonbook.runnable_baselines import MUON_LAYOUTS, RUNNABLE, admitted

Grids = Sequence[tuple[int, int]]
Batches = Iterator[tuple[Tensor, Tensor]]
Kinds = dict[tuple[str, str], Traffic]  # (collective, group) -> calls, payload, bytes sent

GRIDS = [(dp, tp) for dp in range(1, 9) for tp in range(1, 9) if dp * tp <= 8]
LAYOUTS = {name: layout for name, layout in MUON_LAYOUTS.items() if name != "muon_single"}  # which chapter 13 adds
COUNTED = tuple(name for name in RUNNABLE if name != "muon_single")
WARM_UP = 2  # steps before the one that is counted: the first ones allocate


def warmed_up(name: str, workload: Workload, grid: Grid, corpus: Tensor) -> tuple[Trainer, Batches]:
    """Return a baseline that has taken its first steps, and the batches of those that follow. Collective."""
    trainer = RUNNABLE[name].make(workload, grid)
    data = batches(workload, corpus, grid.dp.size, grid.dp.rank)
    for _ in range(WARM_UP):
        trainer.step(next(data))
    return trainer, data


# ---- One step of one baseline ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """One baseline's step on one rank, counted in four ways.

    ledger: with what FSDP2 is predicted to call beside it; None where nothing is ours. native: reduce-scatters are
    called by that name, and not as an all-to-all of the same payload (ours on gloo).
    """

    predicted: Ledger
    ledger: Ledger | None
    dispatched: Ledger
    recorded: dict[str, Seen]
    native: bool

    def expected(self) -> Kinds:
        """Return the prediction in the words of torch's dispatcher."""
        found: Kinds = {}
        for (op, group, _), traffic in self.predicted:
            if op == "reduce_scatter" and not self.native:
                op = "all_to_all"
            group = "world" if group == "mesh" else group  # MuonW's mesh, where it is the whole world
            found[op, group] = found.get((op, group), NOTHING).plus(traffic)
        return {kind: traffic for kind, traffic in found.items() if traffic.calls}

    def faults(self) -> list[str]:
        """Return where the counts disagree, one sentence each."""
        wanted, called = self.expected(), self.dispatched.by_collective()
        found = [f"{kind}: predicted {wanted.get(kind)}, dispatched {called.get(kind)}"
                 for kind in {*wanted, *called} if wanted.get(kind) != called.get(kind)]  # fmt: skip
        if self.ledger is not None:
            found += self.ledger.differences(self.predicted)
        if self.recorded != by_name(wanted):
            found.append(f"predicted {by_name(wanted)}, recorded {self.recorded}")
        return found


def by_name(kinds: Kinds) -> dict[str, Seen]:
    """Return {collective: calls and payload}, all groups together: a profiler's record does not name the group."""
    found: dict[str, Seen] = {}
    for (op, _), traffic in kinds.items():
        calls, size = found.get(op, (0, 0))
        found[op] = Seen(calls + traffic.calls, size + traffic.payload_bytes)
    return found


def count_step(name: str, workload: Workload, grid: Grid, corpus: Tensor) -> Counted:
    """Count a baseline's third step, and profile its fourth. Collective; only for those with a prediction."""
    baseline = RUNNABLE[name]
    predicted = baseline.predict(workload, grid.dp.size, grid.tp.size, (grid.dp.rank, grid.tp.rank))
    trainer, data = warmed_up(name, workload, grid, corpus)
    ledger = None if baseline.ledger is None else baseline.ledger(trainer, grid)
    if ledger is not None:
        ledger.clear()
    with CollectiveCounter() as counter:
        trainer.step(next(data))
    ledger = copy.deepcopy(ledger)
    if ledger is not None and baseline.fsdp2 is not None:
        ledger.add(baseline.fsdp2(workload, grid.dp.size, grid.tp.size))
    with profiled() as events:
        trainer.step(next(data))
    native = grid.dp.native_reduce_scatter or baseline.fsdp2 is not None
    return Counted(predicted, ledger, counter.ledger, seen(events), native)


def count(world: World, workloads: Mapping[str, Workload]) -> list[dict[tuple[str, str], Counted]] | None:
    """Count every step that can be predicted, of every workload that fits; return, on rank 0, what each rank counted.

    {(workload, baseline): counts}
    """
    grid, found = Grid.of(world), {}
    for shape, workload in workloads.items():
        if workload.fits(world.dp, world.tp):
            corpus = pixels(grid, workload.context)
            for name in admitted(workload, world.dp, world.tp, COUNTED):
                if RUNNABLE[name].predicted:
                    found[shape, name] = count_step(name, workload, grid, corpus)
    return world.gather(found)


def faults(ranks: Sequence[Mapping[Any, Counted]]) -> list[str]:
    """Return where the counts of any rank disagree, one sentence each."""
    return [
        f"rank {n}, {which}: {fault}" for n, r in enumerate(ranks) for which, c in r.items() for fault in c.faults()
    ]


def report(ranks: list[dict[tuple[str, str], Counted]], dp: int, tp: int, shape: str) -> tuple[bool, None]:
    """Print what a rank sends, planned and counted, a line per baseline; all is well if every rank's counts agree."""
    print(f"{dp} DP x {tp} TP ranks, model {shape!r}: bytes that a rank sends")
    print("in one step, on average.")
    print("   planned    counted  / ZeRO-1")
    sent = {key: _mean_sent(rank[key] for rank in ranks) for key in ranks[0]}
    _, adamw = sent[shape, "zero1"]
    for key, (planned, counted) in sent.items():
        ratio = f"{counted / adamw:.3f}" if adamw else "-"
        print(f"{planned:>10,.0f} {counted:>10,.0f} {ratio:>9}  {RUNNABLE[key[1]].title}")
    found = faults(ranks)
    print(*found[:5], sep="\n", end="\n" * bool(found))
    print("Plan, ledger, dispatcher, profiler; every rank and")
    print(f"collective, all counts agree: {not found}.")
    return not found, None


def _mean_sent(steps: Iterable[Counted]) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step on average: planned, and as torch's dispatcher counted them."""
    pairs = [(step.predicted.total().sent_bytes, step.dispatched.total().sent_bytes) for step in steps]
    planned, counted = map(statistics.fmean, zip(*pairs, strict=True))
    return planned, counted


# ---- On all grids -----------------------------------------------------------------------------------------


def shape_on(dp: int, tp: int) -> dict[str, Workload]:
    """Return one of the model shapes that can be cut over this grid, by turns, with one sequence per DP rank."""
    shared = {shape: workload.shared_by(dp) for shape, workload in SHAPES.items()}
    fitting = [(shape, workload) for shape, workload in shared.items() if workload.fits(dp, tp)]
    return dict([fitting[GRIDS.index((dp, tp)) % len(fitting)]])


def count_grids(world: World, grids: Grids) -> dict[tuple[int, int], list[dict[tuple[str, str], Counted]] | None]:
    """Return {grid: on rank 0, what every rank counted there}; the same ranks stand on one grid after the other."""
    return {(dp, tp): count(replace(world, dp=dp, tp=tp), shape_on(dp, tp)) for dp, tp in grids}


def counts_on(grids: Grids) -> dict[str, Any]:
    """Count every baseline on every grid; return how much was held against each other."""
    ranks_of: dict[tuple[int, int], Any] = {}
    for size in sorted({dp * tp for dp, tp in grids}):
        mine = [(dp, tp) for dp, tp in grids if dp * tp == size]
        ranks_of |= launch.run(count_grids, (mine,), dp=size)[0]
    rows, found = [], []
    for dp, tp in grids:
        steps = [counted for rank in ranks_of[dp, tp] for counted in rank.values()]
        here = [f"{dp} x {tp}, {fault}" for fault in faults(ranks_of[dp, tp])]
        rows.append({
            "dp": dp, "tp": tp, "shapes": list(shape_on(dp, tp)), "steps": len(steps),
            "collectives": sum(kind.calls for counted in steps for kind in counted.recorded.values()),
            "equal": not here,
        })  # fmt: skip
        found += here
    return {"grids": rows, "faults": found[:20], "equal": not found}
