"""What a training step sends: Muon over ZeRO-1 AdamW, algorithm by algorithm, torch's own Muon, and the wire.

`four_counts` counts inside torch; here is what is made of it, and what the operating system counts below, at each
rank's network interface (`network_emulation.sent`), where that is permitted. Functions that take a `world` run on every
rank; `..._on` and `measure` start worlds. Keys are those of book/results/bytes.json.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import torch.distributed as dist

from distmuon import launch
from distmuon.launch import World, session
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.counter import CollectiveCounter
from muonbook import network_emulation
from muonbook.ch12.contenders import ALGORITHMS, CONTENDERS, admitted
from muonbook.ch12.four_counts import GRIDS, counts_on, warmed_up
from muonbook.measure import formulas
from muonbook.measure.baselines import predict_muon
from muonbook.measure.workload import SHAPES, Workload, pixels

RATIO_GRIDS = [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)]
WIRE_GRIDS = [(4, 1), (3, 1), (8, 1), (2, 2), (4, 2)]
STEPS = 3  # of each contender, that the operating system counts
SETTLE = 0.3  # seconds for late acknowledgements, so that none of the step before is counted

# how the parameters are stored (gradients are always reduced in float32), and how the momentum travels
PAPERS = "fp32, momentum bf16"
DTYPES: dict[str, dict[str, Any]] = {
    PAPERS: {"dtype": "float32"},
    "bf16, momentum bf16": {"dtype": "bfloat16"},
    "fp32, momentum fp32": {"dtype": "float32", "gather_dtype": "float32"},
}
COMPARED = ("zero1", *ALGORITHMS, "adamw_fsdp2", "muonw_fsdp2")
ACTIVATIONS = ("all_reduce", "tp")  # the model's, and every contender's
G, W, M = 4, {"float32": 4, "bfloat16": 2}, {None: 2, "float32": 4}  # bytes per element


# ---- Muon / ZeRO-1 AdamW ----------------------------------------------------------------------------------


def count_matrices(world: World, workloads: Sequence[Workload]) -> list[dict[str, tuple[int, int]]]:
    """Return per workload {contender: (bytes this rank sends per step, for matrices alone and for all parameters)}.

    Of ZeRO-1 AdamW and `gather_all`, from the ledger; activations are left out. Matrices can be told apart only where
    no bucket holds anything else: bucket_size=1.
    """
    grid, rows = Grid.of(world), []
    for workload in workloads:
        layout, muon, _ = workload.plan(world.dp, world.tp)
        labels = {bucket.label for bucket in layout.buckets if set(bucket.params) <= set(muon)}
        names = {layout.specs[index].name for index in muon}
        corpus, found = pixels(grid, workload.context), {}
        for name in ("zero1", "muon"):
            trainer, data = warmed_up(name, workload, grid, corpus)
            grid.ledger.clear()
            trainer.step(next(data))
            ours = [(e.label, t.sent_bytes) for e, t in grid.ledger if (e.op, e.group) != ACTIVATIONS]
            matrices = sum(size for label, size in ours if label.partition(", ")[2] in labels | names)
            found[name] = matrices, sum(size for _, size in ours)
        rows.append(found)
    return rows


def ratios_on(dp: int, tp: int, shape: str = "even") -> list[dict[str, Any]]:
    """Return one row per dtypes of `gather_all` / ZeRO-1 AdamW on this grid, means over ranks: by formula and counted.

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
            expected = formulas.ratio("gather_all", dp, tp, G, W[workload.dtype], M[workload.gather_dtype], s)
            rows.append({"dp": dp, "tp": tp, "dtypes": name, "s": float(s), "formula": float(expected)})
            workloads += [alone, workload]
    ranks = launch.run(count_matrices, (workloads,), dp=dp, tp=tp)
    for number, row in enumerate(rows):
        for which, at, column in (("matrices", 2 * number, 0), ("whole", 2 * number + 1, 1)):
            muon_sent, adamw_sent = (sum(rank[at][name][column] for rank in ranks) for name in ("muon", "zero1"))
            row[which] = muon_sent / adamw_sent
    return rows


# ---- Muon, algorithm by algorithm -------------------------------------------------------------------------


def count_optimizers(world: World, workload: Workload) -> dict[str, int]:
    """Return {contender: bytes this rank sends per step}, activations left out, as torch's dispatcher counts them."""
    grid = Grid.of(world)
    found, corpus = {}, pixels(grid, workload.context)
    for name in (name for name in COMPARED if CONTENDERS[name].admits(workload, world.dp, world.tp)):
        trainer, data = warmed_up(name, workload, grid, corpus)
        with CollectiveCounter() as counter:
            trainer.step(next(data))
        op, group = ACTIVATIONS
        found[name] = counter.ledger.total().sent_bytes - counter.ledger.total(op=op, group=group).sent_bytes
    return found


def algorithms_on(dp: int, tp: int, shape: str = "even") -> list[dict[str, Any]]:
    """Return one row per contender of COMPARED on this grid, in the paper's dtypes, means over ranks.

    sent: bytes, counted. over_zero1: of all parameters, counted. Of Muon's algorithms also s, ratio: of matrices alone,
    by formula; and closed: whether formula and what stands beside it are what was counted, as fractions.
    """
    workload, planned = SHAPES[shape].shared_by(dp), {}
    w, m = W[workload.dtype], M[workload.gather_dtype]
    with session.environment(session.directory()):  # planning makes torch leave a folder behind
        for name, algorithm in ALGORITHMS.items():
            layout, muon = algorithm.plan(workload, dp, tp)
            n, s = sum(layout.specs[index].numel for index in muon), formulas.mean_owners(layout, muon)
            zeros = m if algorithm.strategy == "gather_all" else 0
            beside = sum(formulas.beside(layout, tp, muon, zeros).values())
            closed = formulas.muon(algorithm.strategy, dp, tp, n, G, w, m, s) + beside
            planned[name] = s, formulas.ratio(algorithm.strategy, dp, tp, G, w, m, s), closed
    ranks = launch.run(count_optimizers, (workload,), dp=dp, tp=tp)
    sent = {name: Fraction(sum(rank[name] for rank in ranks), len(ranks)) for name in ranks[0]}
    rows = []
    for name, mean in sent.items():
        row = {"dp": dp, "tp": tp, "contender": name, "sent": float(mean), "over_zero1": float(mean / sent["zero1"])}
        if name in planned:
            s, ratio, closed = planned[name]
            row |= {"s": float(s), "ratio": float(ratio), "closed": closed == mean}
        rows.append(row)
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


def fsdp2_on(dp: int, shape: str = "even") -> dict[str, Any]:
    """Return what torch.optim.Muon on FSDP2 calls and sends in a step, on rank 0, beside our Muon's prediction.

    update: by Muon and AdamW. model: by forward and backward, which gather parameters (ZeRO-3) and reduce gradients.
    gather_all_momentum: our Muon's momentum gathers alone.
    """
    workload = SHAPES[shape].shared_by(dp)
    with session.environment(session.directory()):  # planning makes torch leave a folder behind
        matrices, ours = len(workload.plan(dp, 1)[1]), predict_muon(workload, dp, 1, 0)
    model, update = (ledger.total() for ledger in launch.run(count_fsdp2, (workload,), dp=dp)[0])
    momentum = sum(traffic.sent_bytes for entry, traffic in ours if entry.label.startswith("momentum"))
    return {
        "dp": dp, "shape": shape, "matrices": matrices,
        "update_calls": update.calls, "update_sent": update.sent_bytes,
        "model_calls": model.calls, "model_sent": model.sent_bytes,
        "gather_all_momentum": momentum, "gather_all_sent": ours.total().sent_bytes,
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
    """Let the operating system count `steps` steps of every contender. Only in a world with `link`."""
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


def settled() -> network_emulation.Sent:
    """Return this rank's counter once every rank is here and the links are quiet."""
    dist.barrier()
    time.sleep(SETTLE)
    return network_emulation.sent()


def wire_on(dp: int, tp: int, shape: str = "even", steps: int = STEPS) -> list[dict[str, Any]]:
    """Return one row per contender: what left all interfaces together, and at the ranks, over the ring formula's bytes.

    Needs `network_emulation.setup_bridge`. payload: frames without the 66 bytes of headers of every packet. on_gloo,
    least_rank, greatest_rank: over what it is if gloo carries out a reduce-scatter that torch calls as an all-reduce.
    """
    given, link = (SHAPES[shape].shared_by(dp), steps), network_emulation.Link()
    ranks = network_emulation.run(count_wire, given, dp=dp, tp=tp, link=link)
    rows = []
    for name in ranks[0]:
        found: list[OnTheWire] = [rank[name] for rank in ranks]
        total = {key: sum(asdict(rank)[key] for rank in found) for key in asdict(found[0])}
        each = [rank.payload / (rank.ring + rank.reduce_scatter) for rank in found]
        rows.append({
            "dp": dp, "tp": tp, "contender": name, **total,
            "ratio": total["payload"] / total["ring"],
            "on_gloo": total["payload"] / (total["ring"] + total["reduce_scatter"]),
            "least_rank": min(each), "greatest_rank": max(each),
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
        "algorithms": [row for dp, tp in ratio_grids for row in algorithms_on(dp, tp)],
        "fsdp2": [fsdp2_on(dp) for dp in fsdp2],
        "header_bytes": network_emulation.HEADER,
        "obstacle": obstacle,
        "wire": None if obstacle else [row for dp, tp in wire_grids for row in wire_on(dp, tp)],
    }
