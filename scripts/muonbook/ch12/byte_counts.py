"""Count what a training step sends, at one floor of the building after the other.

    predicted     from the map and the model's description, before any process exists
    ledger        rows written by our own collectives as they are called
    dispatched    what torch's dispatcher sees being called, whoever calls it     (counter.CollectiveCounter)
    recorded      what torch.profiler writes into a trace                         (profiled.count_once)

and below them all, where that is permitted, what the operating system counts at each rank's network interface
(`hosts.sent`). Calls and payload are counted anew on every floor; bytes *sent* follow from them by one ring formula
(`ledger.ring_bytes`), which only the operating system can check. All functions here run on every rank.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from distmuon.launch import hosts
from distmuon.optim.muon import Muon
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger, Traffic
from distmuon.verify.counter import CollectiveCounter
from muonbook.measure.baselines import CONTENDERS, ONE_BUCKET, Trainer
from muonbook.measure.profiled import Seen, profiled, seen, sounding_right
from muonbook.measure.workload import Workload, batches, pixels

WARM_UP = 2  # steps before the one that is counted: the first ones allocate
SETTLE = 0.3  # seconds for late acknowledgements, so that none of the step before is counted
OURS = ("zero1", "muon")  # every collective of theirs is in the ledger; torch's own are not

Kinds = dict[tuple[str, str], Traffic]  # (collective, group) -> calls, payload, bytes sent


class Bench:
    """One contender, warmed up, on this rank; `step` takes one whole training step."""

    def __init__(self, name: str, workload: Workload, grid: Grid, corpus: torch.Tensor) -> None:
        self.trainer: Trainer = CONTENDERS[name].make(workload, grid, ONE_BUCKET)
        self.batches = batches(workload, corpus, grid.dp.size, grid.dp.rank)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> None:
        self.forward_backward()
        self.trainer.update()

    def forward_backward(self) -> None:
        self.trainer.forward_backward(*next(self.batches))


# ---- Predicted, ledger, dispatched, recorded --------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """One contender's step on one rank, counted in four ways. ledger: None for a contender that is not ours."""

    predicted: Ledger
    ledger: Ledger | None
    dispatched: Ledger
    recorded: dict[str, Seen]
    sounding_right: int  # events of the trace that a reader of names would add up
    native: bool  # reduce-scatters are called by that name (nccl), and not as an all-to-all of the same payload (gloo)

    def expected(self) -> Kinds:
        """Return the prediction in the words of torch's dispatcher."""
        return {
            ("all_to_all" if op == "reduce_scatter" and not self.native else op, group): traffic
            for (op, group), traffic in self.predicted.by_collective().items()
        }

    def faults(self) -> list[str]:
        """Return where the counts disagree, one sentence each."""
        wanted, called = self.expected(), self.dispatched.by_collective()
        found = [f"{kind}: predicted {wanted.get(kind)}, dispatched {called.get(kind)}"
                 for kind in {*wanted, *called} if wanted.get(kind) != called.get(kind)]  # fmt: skip
        if self.ledger is not None:
            found += self.ledger.differences(self.predicted)
        recorded = {op: (row.calls, row.payload_bytes) for op, row in self.recorded.items()}
        if recorded != by_name(wanted):
            found.append(f"predicted {by_name(wanted)}, recorded {recorded}")
        return found


def by_name(kinds: Kinds) -> dict[str, tuple[int, int]]:
    """Return {collective: (calls, payload bytes)}, all groups together: a profiler's record does not name the group."""
    found: dict[str, tuple[int, int]] = {}
    for (op, _), traffic in kinds.items():
        calls, size = found.get(op, (0, 0))
        found[op] = calls + traffic.calls, size + traffic.payload_bytes
    return found


def count_step(name: str, workload: Workload, grid: Grid, corpus: torch.Tensor) -> Counted:
    """Count a contender's third step, and profile its fourth. Collective; only for contenders with a prediction."""
    predict = CONTENDERS[name].predict
    assert predict is not None
    predicted = predict(workload, grid.dp.size, grid.tp.size, grid.dp.rank)
    bench = Bench(name, workload, grid, corpus)
    grid.ledger.clear()
    with CollectiveCounter() as counter:
        bench.step()
    ledger = copy.deepcopy(grid.ledger) if name in OURS else None
    with profiled() as events:
        bench.step()
    return Counted(
        predicted, ledger, counter.ledger, seen(events), sounding_right(events), grid.dp.native_reduce_scatter
    )


def count_all(grid: Grid, workloads: Mapping[str, Workload]) -> dict[tuple[str, str], Counted]:
    """Count every step that can be predicted, of every workload that fits: {(workload, contender): counts}."""
    dp, tp = grid.dp.size, grid.tp.size
    found = {}
    for shape, workload in workloads.items():
        if workload.fits(dp, tp):
            corpus = pixels(grid, workload.context)
            for name, contender in CONTENDERS.items():
                if contender.predict is not None and contender.admits(workload, dp, tp):
                    found[shape, name] = count_step(name, workload, grid, corpus)
    return found


def count_fsdp2(grid: Grid, workload: Workload) -> tuple[Ledger, Ledger]:
    """Return what torch.optim.Muon on FSDP2 sends for the model (forward and backward), and in the update."""
    bench = Bench("muon_fsdp2", workload, grid, pixels(grid, workload.context))
    with CollectiveCounter() as model:
        bench.forward_backward()
    with CollectiveCounter() as update:
        bench.trainer.update()
    return model.ledger, update.ledger


def stray_fsdp2(grid: Grid, workload: Workload, steps: int = 3) -> dict[str, float]:
    """Return how far FSDP2's Muon strays from torch.optim.Muon on one process that reads the whole batch. Collective.

    {"stray": that, "rounding": how far the one process strays from Muon in float32}: both the largest over matrices of
    |difference| / |movement|, Frobenius norms, after `steps` steps.
    """
    alone = Grid.alone(grid.device.type)
    corpus = pixels(grid, workload.context)

    def train(name: str, where: Grid, steps: int, **muon: Any) -> list[torch.Tensor]:
        trainer = CONTENDERS[name].make(workload, where, None)
        matrices = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        if muon:
            trainer.optimizers[0] = Muon(matrices, lr=workload.lr, weight_decay=workload.weight_decay, **muon)
        data = batches(workload, corpus, where.dp.size, where.dp.rank)
        for _ in range(steps):
            trainer.forward_backward(*next(data))
            trainer.update()
        return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in matrices]

    begin, one = train("muon_fsdp2", alone, 0), train("muon_fsdp2", alone, steps)

    def stray(others: list[torch.Tensor]) -> float:
        rows = zip(others, one, begin, strict=True)
        return max(((other - mine).norm() / (mine - first).norm()).item() for other, mine, first in rows)

    exact = train("muon_ddp", alone, steps, input_dtype=torch.float32)
    return {"stray": stray(train("muon_fsdp2", grid, steps)), "rounding": stray(exact)}


# ---- Muon / ZeRO-1 AdamW ----------------------------------------------------------------------------------


def count_optimizers(grid: Grid, workload: Workload) -> dict[str, tuple[int, int]]:
    """Return {contender: (bytes this rank sends per step, for matrices alone and for all parameters)}, from the ledger.

    Activations are left out. Matrices can be told apart only where no bucket holds anything else: bucket_size=1.
    """
    layout, muon, _ = workload.plan(grid.dp.size, grid.tp.size)
    labels = {bucket.label for bucket in layout.buckets if set(bucket.params) <= set(muon)}
    names = {layout.specs[index].name for index in muon}
    corpus, found = pixels(grid, workload.context), {}
    for name in OURS:
        bench = Bench(name, workload, grid, corpus)
        grid.ledger.clear()
        bench.step()
        ours = [(e.label, t.sent_bytes) for e, t in grid.ledger if (e.op, e.group) != ("all_reduce", "tp")]
        matrices = sum(size for label, size in ours if label.partition(", ")[2] in labels | names)
        found[name] = matrices, sum(size for _, size in ours)
    return found


# ---- The operating system's count -------------------------------------------------------------------------


@dataclass(frozen=True)
class OnTheWire:
    """What left a rank's interface in some steps. bytes: whole frames; payload: without headers. ring: what the ring
    formula says of the collectives dispatched meanwhile; reduce_scatter: the part of it that torch calls by this name.
    """

    bytes: int
    packets: int
    payload: int
    ring: int
    reduce_scatter: int


def count_wire(name: str, workload: Workload, grid: Grid, corpus: torch.Tensor, steps: int) -> OnTheWire:
    """Let the operating system count `steps` steps of one contender. Only in a world with `link`. Collective."""
    bench = Bench(name, workload, grid, corpus)
    with CollectiveCounter() as counter:
        before = settled()
        for _ in range(steps):
            bench.step()
        found = settled().since(before)
    sent = counter.ledger.total().sent_bytes, counter.ledger.total(op="reduce_scatter").sent_bytes
    return OnTheWire(found.bytes, found.packets, found.payload, *sent)


def settled() -> hosts.Sent:
    """Return this rank's counter once every rank is here and the wires are quiet."""
    dist.barrier()
    time.sleep(SETTLE)
    return hosts.sent()
