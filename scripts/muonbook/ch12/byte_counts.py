"""Count what a training step sends, at one floor of the building after the other, on every grid up to eight ranks.

    predicted     from the map and the model's description, before any process exists
    ledger        rows written by our own collectives as they are called
    dispatched    what torch's dispatcher sees being called, whoever calls it     (counter.CollectiveCounter)
    recorded      what torch.profiler writes into a trace                         (profiler.count_once)

and below them all, where that is permitted, what the operating system counts at each rank's network interface
(`hosts.sent`). Calls and payload are counted anew on every floor; bytes *sent* follow from them by one ring formula
(`ledger.ring_bytes`), which only the operating system can check.

Functions that take a `world` run on every rank; `..._on` and `measure` start worlds. Keys are those of
book/results/bytes.json.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon import launch
from distmuon.launch import World, hosts, session
from distmuon.optim.muon import Muon
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger, Traffic
from distmuon.verify.counter import CollectiveCounter
from muonbook.measure import formulas
from muonbook.measure.baselines import BASELINES, ONE_BUCKET, Trainer, admitted, predict_muon
from muonbook.measure.profiler import Seen, profiled, seen, sounding_right
from muonbook.measure.workload import SHAPES, Workload, batches, pixels

Grids = Sequence[tuple[int, int]]
Batches = Iterator[tuple[Tensor, Tensor]]
Kinds = dict[tuple[str, str], Traffic]  # (collective, group) -> calls, payload, bytes sent

GRIDS = [(dp, tp) for dp in range(1, 9) for tp in range(1, 9) if dp * tp <= 8]
RATIO_GRIDS = [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)]
WIRE_GRIDS = [(4, 1), (3, 1), (8, 1), (2, 2), (4, 2)]
OURS = ("zero1", "muon")  # every collective of theirs is in the ledger; torch's own are not
WARM_UP = 2  # steps before the one that is counted: the first ones allocate
STEPS = 3  # of each baseline, that the operating system counts
SETTLE = 0.3  # seconds for late acknowledgements, so that none of the step before is counted

# how the parameters are stored (gradients are always reduced in float32), and how the momentum travels
DTYPES: dict[str, dict[str, Any]] = {
    "fp32, momentum bf16": {"dtype": "float32"},
    "bf16, momentum bf16": {"dtype": "bfloat16"},
    "fp32, momentum fp32": {"dtype": "float32", "gather_dtype": "float32"},
}
G, W, M = 4, {"float32": 4, "bfloat16": 2}, {None: 2, "float32": 4}  # bytes per element


def warmed_up(name: str, workload: Workload, grid: Grid, corpus: Tensor) -> tuple[Trainer, Batches]:
    """Return a baseline that has taken its first steps, and the batches of those that follow. Collective."""
    trainer = BASELINES[name].make(workload, grid, ONE_BUCKET)
    data = batches(workload, corpus, grid.dp.size, grid.dp.rank)
    for _ in range(WARM_UP):
        trainer.step(next(data))
    return trainer, data


# ---- Predicted, ledger, dispatched, recorded --------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """One baseline's step on one rank, counted in four ways. ledger: None for a baseline that is not ours."""

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


def count_step(name: str, workload: Workload, grid: Grid, corpus: Tensor) -> Counted:
    """Count a baseline's third step, and profile its fourth. Collective; only for baselines with a prediction."""
    predict = BASELINES[name].predict
    assert predict is not None
    predicted = predict(workload, grid.dp.size, grid.tp.size, grid.dp.rank)
    trainer, data = warmed_up(name, workload, grid, corpus)
    grid.ledger.clear()
    with CollectiveCounter() as counter:
        trainer.step(next(data))
    ledger = copy.deepcopy(grid.ledger) if name in OURS else None
    with profiled() as events:
        trainer.step(next(data))
    return Counted(
        predicted, ledger, counter.ledger, seen(events), sounding_right(events), grid.dp.native_reduce_scatter
    )


def count(world: World, workloads: Mapping[str, Workload]) -> list[dict[tuple[str, str], Counted]] | None:
    """Count every step that can be predicted, of every workload that fits; return, on rank 0, what each rank counted.

    {(workload, baseline): counts}
    """
    grid, found = Grid.of(world), {}
    for shape, workload in workloads.items():
        if workload.fits(world.dp, world.tp):
            corpus = pixels(grid, workload.context)
            for name, baseline in admitted(workload, world.dp, world.tp).items():
                if baseline.predict is not None:
                    found[shape, name] = count_step(name, workload, grid, corpus)
    return world.gather(found)


def faults(ranks: Sequence[Mapping[Any, Counted]]) -> list[str]:
    """Return where the counts of any rank disagree, one sentence each."""
    return [
        f"rank {n}, {which}: {fault}" for n, r in enumerate(ranks) for which, c in r.items() for fault in c.faults()
    ]


def tell(ranks: list[dict[tuple[str, str], Counted]], dp: int, tp: int, shape: str) -> tuple[bool, None]:
    """Print rank 0's counts, a line per baseline and collective; all is well if every rank's agree."""

    def equal(found: object, expected: object) -> str:
        return "=" if found == expected else "differs"

    print(f"{dp} DP x {tp} TP ranks, model {shape!r}:")
    print("payload of one step on rank 0, in bytes")
    print("predicted ledger dispatched recorded  collectives")
    for (_, name), step in ranks[0].items():
        print(BASELINES[name].title)
        called = by_name(step.dispatched.by_collective())
        written = "-" if step.ledger is None else equal(step.ledger.differences(step.predicted), [])
        for op, (calls, size) in by_name(step.expected()).items():
            columns = equal(called[op], (calls, size)), equal(step.recorded[op], (calls, size))
            print(f"{size:>9,}{written:>7}{columns[0]:>11}{columns[1]:>9}  {calls:>2} {op}")
    found = faults(ranks)
    print(*found[:5], sep="\n", end="\n" * bool(found))
    print("Every rank, contender and collective, calls and bytes:")
    print(f"all counts agree: {not found}.")
    return not found, None


def shapes_on(dp: int, tp: int) -> dict[str, Workload]:
    """Return the model shapes that can be cut over this grid, each with one sequence per DP rank and step."""
    shared = {shape: workload.shared_by(dp) for shape, workload in SHAPES.items()}
    return {shape: workload for shape, workload in shared.items() if workload.fits(dp, tp)}


def counts_on(grids: Grids) -> dict[str, Any]:
    """Count every baseline and shape on every grid; return how much was held against each other."""
    rows, found = [], []
    for dp, tp in grids:
        workloads = shapes_on(dp, tp)
        ranks = launch.run(count, (workloads,), dp=dp, tp=tp)[0]
        steps = [counted for rank in ranks for counted in rank.values()]
        here = [f"{dp} x {tp}, {fault}" for fault in faults(ranks)]
        rows.append({
            "dp": dp, "tp": tp, "shapes": list(workloads), "steps": len(steps),
            "collectives": sum(kind.calls for counted in steps for kind in counted.recorded.values()),
            "records": sum(counted.sounding_right for counted in steps),
            "equal": not here,
        })  # fmt: skip
        found += here
    return {"grids": rows, "faults": found[:20], "equal": not found}


# ---- Muon / ZeRO-1 AdamW ----------------------------------------------------------------------------------


def count_optimizers(world: World, workloads: Sequence[Workload]) -> list[dict[str, tuple[int, int]]]:
    """Return per workload {baseline: (bytes this rank sends per step, for matrices alone and for all parameters)}.

    From the ledger; activations are left out. Matrices can be told apart only where no bucket holds anything else:
    bucket_size=1.
    """
    grid, rows = Grid.of(world), []
    for workload in workloads:
        layout, muon, _ = workload.plan(world.dp, world.tp)
        labels = {bucket.label for bucket in layout.buckets if set(bucket.params) <= set(muon)}
        names = {layout.specs[index].name for index in muon}
        corpus, found = pixels(grid, workload.context), {}
        for name in OURS:
            trainer, data = warmed_up(name, workload, grid, corpus)
            grid.ledger.clear()
            trainer.step(next(data))
            ours = [(e.label, t.sent_bytes) for e, t in grid.ledger if (e.op, e.group) != ("all_reduce", "tp")]
            matrices = sum(size for label, size in ours if label.partition(", ")[2] in labels | names)
            found[name] = matrices, sum(size for _, size in ours)
        rows.append(found)
    return rows


def ratios_on(dp: int, tp: int, shape: str = "even") -> list[dict[str, Any]]:
    """Return one row per dtypes of Muon / ZeRO-1 AdamW on this grid, means over ranks: by formula, and as counted.

    matrices: counted in buckets of one parameter each, so that what belongs to matrices can be told apart.
    whole: everything the two optimizers send, buckets as they are, embeddings and norms included.
    """
    rows, workloads = [], []
    with session.environment(session.directory()):  # planning makes torch leave a folder behind
        for name, change in DTYPES.items():
            workload = replace(SHAPES[shape].shared_by(dp), **change)
            alone = replace(workload, bucket_size=1)
            layout, muon, _ = alone.plan(dp, tp)
            s = formulas.mean_owners(layout, muon)
            expected = formulas.ratio(dp, tp, G, W[workload.dtype], M[workload.gather_dtype], s)
            rows.append({"dp": dp, "tp": tp, "dtypes": name, "s": float(s), "formula": float(expected)})
            workloads += [alone, workload]
    ranks = launch.run(count_optimizers, (workloads,), dp=dp, tp=tp)
    for number, row in enumerate(rows):
        for which, at, column in (("matrices", 2 * number, 0), ("whole", 2 * number + 1, 1)):
            muon_sent, adamw_sent = (sum(rank[at][name][column] for rank in ranks) for name in ("muon", "zero1"))
            row[which] = muon_sent / adamw_sent
    return rows


# ---- torch's own Muon -------------------------------------------------------------------------------------


def count_fsdp2(world: World, workload: Workload) -> tuple[Ledger, Ledger]:
    """Return what torch.optim.Muon on FSDP2 sends for the model (forward and backward), and in the update."""
    grid = Grid.of(world)
    trainer, data = warmed_up("muon_fsdp2", workload, grid, pixels(grid, workload.context))
    with CollectiveCounter() as model:
        trainer.forward_backward(*next(data))
    with CollectiveCounter() as update:
        trainer.update()
    return model.ledger, update.ledger


def stray_fsdp2(world: World, workload: Workload, steps: int = 3) -> dict[str, float]:
    """Return how far FSDP2's Muon strays from torch.optim.Muon on one process that reads the whole batch. Collective.

    {"stray": that, "rounding": how far the one process strays from Muon in float32}: both the largest over matrices of
    |difference| / |movement|, Frobenius norms, after `steps` steps.
    """
    grid = Grid.of(world)
    alone, corpus = Grid.alone(grid.device.type), pixels(grid, workload.context)

    def train(name: str, where: Grid, steps: int, **muon: Any) -> list[Tensor]:
        trainer = BASELINES[name].make(workload, where, None)
        matrices = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        if muon:
            trainer.optimizers[0] = Muon(matrices, **workload.hyperparameters, **muon)
        data = batches(workload, corpus, where.dp.size, where.dp.rank)
        for _ in range(steps):
            trainer.step(next(data))
        return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in matrices]

    begin, one = train("muon_fsdp2", alone, 0), train("muon_fsdp2", alone, steps)

    def stray(others: list[Tensor]) -> float:
        rows = zip(others, one, begin, strict=True)
        return max(((other - mine).norm() / (mine - first).norm()).item() for other, mine, first in rows)

    exact = train("muon_ddp", alone, steps, input_dtype=torch.float32)
    return {"stray": stray(train("muon_fsdp2", grid, steps)), "rounding": stray(exact)}


def fsdp2_on(dp: int, shape: str = "even") -> dict[str, Any]:
    """Return what torch.optim.Muon on FSDP2 calls and sends in a step, on rank 0, beside our Muon's prediction.

    update: by Muon and AdamW. model: by forward and backward, which gather parameters (ZeRO-3) and reduce gradients.
    gather_all_momentum: our Muon's momentum gathers alone. stray, rounding: `stray_fsdp2`'s.
    """
    workload = SHAPES[shape].shared_by(dp)
    with session.environment(session.directory()):  # planning makes torch leave a folder behind
        matrices, ours = len(workload.plan(dp, 1)[1]), predict_muon(workload, dp, 1, 0)
    model, update = (ledger.total() for ledger in launch.run(count_fsdp2, (workload,), dp=dp)[0])
    strays = launch.run(stray_fsdp2, (workload,), dp=dp)
    momentum = sum(traffic.sent_bytes for entry, traffic in ours if entry.label.startswith("momentum"))
    return {
        "dp": dp, "shape": shape, "matrices": matrices,
        "update_calls": update.calls, "update_sent": update.sent_bytes,
        "model_calls": model.calls, "model_sent": model.sent_bytes,
        "gather_all_momentum": momentum, "gather_all_sent": ours.total().sent_bytes,
        **{key: max(rank[key] for rank in strays) for key in ("stray", "rounding")},
    }  # fmt: skip


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


def count_wire(world: World, workload: Workload, steps: int) -> dict[str, OnTheWire]:
    """Let the operating system count `steps` steps of every baseline. Only in a world with `link`."""
    grid, found = Grid.of(world), {}
    corpus = pixels(grid, workload.context)
    for name in admitted(workload, world.dp, world.tp):
        trainer, data = warmed_up(name, workload, grid, corpus)
        with CollectiveCounter() as counter:
            before = settled()
            for _ in range(steps):
                trainer.step(next(data))
            left = settled().since(before)
        sent = counter.ledger.total().sent_bytes, counter.ledger.total(op="reduce_scatter").sent_bytes
        found[name] = OnTheWire(left.bytes, left.packets, left.payload, *sent)
    return found


def settled() -> hosts.Sent:
    """Return this rank's counter once every rank is here and the links are quiet."""
    dist.barrier()
    time.sleep(SETTLE)
    return hosts.sent()


def wire_on(dp: int, tp: int, shape: str = "even", steps: int = STEPS) -> list[dict[str, Any]]:
    """Return one row per baseline: what left all interfaces together, and at the ranks, over the ring formula's bytes.

    Needs `hosts.become_switch`. payload: frames without the 66 bytes of headers of every packet.
    """
    ranks = launch.run(count_wire, (SHAPES[shape].shared_by(dp), steps), dp=dp, tp=tp, link=hosts.Link())
    rows = []
    for name in ranks[0]:
        found: list[OnTheWire] = [rank[name] for rank in ranks]
        total = {key: sum(asdict(rank)[key] for rank in found) for key in asdict(found[0])}
        each = [rank.payload / rank.ring for rank in found]
        rows.append({
            "dp": dp, "tp": tp, "contender": name, **total,
            "ratio": total["payload"] / total["ring"], "least_rank": min(each), "greatest_rank": max(each),
        })  # fmt: skip
    return rows


# ---- All of it --------------------------------------------------------------------------------------------


def measure(quick: bool, obstacle: str | None) -> dict[str, Any]:
    """Take every measurement of the chapter. obstacle: why there are no networks for the ranks; None if there are."""
    grids, ratio_grids, wire_grids, fsdp2 = GRIDS, RATIO_GRIDS, WIRE_GRIDS, [2, 4, 8]
    if quick:
        grids, ratio_grids, wire_grids, fsdp2 = [(2, 1), (2, 2)], [(2, 1)], [(2, 2)], [2]
    return {
        "counted": counts_on(grids),
        "ratios": [row for dp, tp in ratio_grids for row in ratios_on(dp, tp)],
        "fsdp2": [fsdp2_on(dp) for dp in fsdp2],
        "header_bytes": hosts.HEADER,
        "obstacle": obstacle,
        "wire": None if obstacle else [row for dp, tp in wire_grids for row in wire_on(dp, tp)],
    }
