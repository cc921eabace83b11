"""What a training step sends: Muon over ZeRO-1 AdamW, layout by layout, torch's own Muon, and the wire.

`four_counts` counts inside torch; here is what is made of it, and what the operating system counts below, at each
rank's network interface (`network_emulation.sent`), where that is permitted. Functions that take a `world` run on every
rank; `..._on` and `measure` start worlds; `report_...` print values first, because on a telephone the right end of a
line is off the screen. Keys are those of book/results/bytes.json.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch.distributed as dist

from distmuon import launch
from distmuon.launch import World, session
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.counter import CollectiveCounter
from muonbook import network_emulation
from muonbook.ch12.four_counts import COUNTED, GRIDS, LAYOUTS, counts_on, warmed_up
from muonbook.measure import formulas
from muonbook.measure.workload import SHAPES, Workload, pixels
from muonbook.runnable_baselines import RUNNABLE, admitted

RATIO_GRIDS = [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)]
WIRE_GRIDS = [(4, 1), (3, 1), (8, 1), (2, 2), (4, 2)]
STEPS = 3  # of each baseline, that the operating system counts
SETTLE = 0.3  # seconds for late acknowledgements, so that none of the step before is counted

# how the parameters are stored (gradients are always reduced in float32), and how the momentum travels
PAPERS = "fp32, momentum bf16"
DTYPES: dict[str, dict[str, Any]] = {
    PAPERS: {"dtype": "float32"},
    "bf16, momentum bf16": {"dtype": "bfloat16"},
    "fp32, momentum fp32": {"dtype": "float32", "gather_dtype": "float32"},
}
COMPARED = ("zero1", *LAYOUTS, "adamw_fsdp2", "muonw")
ACTIVATIONS = ("all_reduce", "tp")  # the model's, and every baseline's
Rows = Sequence[Mapping[str, Any]]
G, W, M = 4, {"float32": 4, "bfloat16": 2}, {None: 2, "float32": 4}  # bytes per element


# ---- Muon / ZeRO-1 AdamW ----------------------------------------------------------------------------------


def count_matrices(world: World, workloads: Sequence[Workload]) -> list[dict[str, int]]:
    """Return per workload {baseline: bytes this rank sends per step for matrices}.

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
            sent = [(e.label, t.sent_bytes) for e, t in grid.ledger if (e.op, e.group) != ACTIVATIONS]
            found[name] = sum(size for label, size in sent if label.partition(", ")[2] in labels | names)
        rows.append(found)
    return rows


def ratios_on(dp: int, tp: int, shape: str = "even") -> list[dict[str, Any]]:
    """Return one row per dtypes of `gather_all` / ZeRO-1 AdamW on this grid, of matrices alone, means over ranks.

    formula: by the closed formula. matrices: counted, in buckets of one parameter each.
    """
    rows, workloads = [], []
    with session.environment(session.directory()):  # planning makes torch leave a folder behind
        for name, change in DTYPES.items():
            workload = replace(SHAPES[shape].shared_by(dp), bucket_size=1, **change)
            layout, muon, _ = workload.plan(dp, tp)
            s = formulas.mean_owners(layout, muon)
            expected = formulas.ratio("gather_all", dp, tp, G, W[workload.dtype], M[workload.gather_dtype], s)
            rows.append({"dp": dp, "tp": tp, "dtypes": name, "s": float(s), "formula": float(expected)})
            workloads.append(workload)
    ranks = launch.run(count_matrices, (workloads,), dp=dp, tp=tp)
    for row, counts in zip(rows, zip(*ranks, strict=True), strict=True):
        muon_sent, adamw_sent = (sum(rank[name] for rank in counts) for name in ("muon", "zero1"))
        row["matrices"] = muon_sent / adamw_sent
    return rows


# ---- Muon, layout by layout -------------------------------------------------------------------------------


def count_optimizers(world: World, workload: Workload) -> dict[str, int]:
    """Return {baseline: bytes this rank sends per step}, activations left out, as torch's dispatcher counts them."""
    grid = Grid.of(world)
    found, corpus = {}, pixels(grid, workload.context)
    for name in admitted(workload, world.dp, world.tp, COMPARED):
        trainer, data = warmed_up(name, workload, grid, corpus)
        with CollectiveCounter() as counter:
            trainer.step(next(data))
        op, group = ACTIVATIONS
        found[name] = counter.ledger.total().sent_bytes - counter.ledger.total(op=op, group=group).sent_bytes
    return found


def compared_on(dp: int, tp: int, shape: str = "even") -> list[dict[str, Any]]:
    """Return one row per baseline of COMPARED on this grid, in the paper's dtypes, means over ranks.

    sent: bytes, counted. over_zero1: of all parameters, counted. Of Muon's layouts also s, ratio: of matrices alone,
    by formula; and closed: whether formula and what stands beside it are what was counted, as fractions.
    """
    workload, planned = SHAPES[shape].shared_by(dp), {}
    w, m = W[workload.dtype], M[workload.gather_dtype]
    with session.environment(session.directory()):  # planning makes torch leave a folder behind
        for name, muons in LAYOUTS.items():
            layout, muon = muons.plan(workload, dp, tp)
            n, s = sum(layout.specs[index].numel for index in muon), formulas.mean_owners(layout, muon)
            zeros = m if muons.strategy == "gather_all" else 0
            beside = sum(formulas.beside(layout, tp, muon, zeros).values())
            closed = formulas.muon(muons.strategy, dp, tp, n, G, w, m, s) + beside
            planned[name] = s, formulas.ratio(muons.strategy, dp, tp, G, w, m, s), closed
    ranks = launch.run(count_optimizers, (workload,), dp=dp, tp=tp)
    sent = {name: Fraction(sum(rank[name] for rank in ranks), len(ranks)) for name in ranks[0]}
    rows = []
    for name, mean in sent.items():
        row = {"dp": dp, "tp": tp, "baseline": name, "sent": float(mean), "over_zero1": float(mean / sent["zero1"])}
        if name in planned:
            s, ratio, closed = planned[name]
            row |= {"s": float(s), "ratio": float(ratio), "closed": closed == mean}
        rows.append(row)
    return rows


def report_ratios(rows: Rows) -> bool:
    """Print Muon / ZeRO-1 AdamW on one grid; return whether what was counted is what the formulas say."""
    print(f"{rows[0]['dp']} DP x {rows[0]['tp']} TP ranks, {PAPERS}; bytes of Muon / ZeRO-1 AdamW:")
    print("formula  counted")
    ours = [row for row in rows if row["baseline"] in LAYOUTS]
    for row in ours:
        print(f"{row['ratio']:>7.3f}{row['over_zero1']:>9.3f}  {RUNNABLE[row['baseline']].title}")
    closed = all(row["closed"] for row in ours)
    print(f"Formula + padding + AdamW's + norms = counted: {closed}.")
    return closed


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


def fsdp2_on(dp: int) -> dict[str, int]:
    """Return what the update of torch.optim.Muon on FSDP2 calls and sends on rank 0, and our momentum gathers send."""
    workload = SHAPES["even"].shared_by(dp)
    with session.environment(session.directory()):  # planning makes torch leave a folder behind
        matrices, ours = len(workload.plan(dp, 1)[1]), RUNNABLE["muon"].predict(workload, dp, 1, (0, 0))
    update = launch.run(count_fsdp2, (workload,), dp=dp)[0][1].total()
    momentum = sum(traffic.sent_bytes for entry, traffic in ours if entry.label.startswith("momentum"))
    sent = {"update_calls": update.calls, "update_sent": update.sent_bytes, "gather_all_momentum": momentum}
    return {"dp": dp, "matrices": matrices, **sent}


# ---- The operating system's count -------------------------------------------------------------------------


def count_wire(world: World, workload: Workload, steps: int) -> dict[str, dict[str, int]]:
    """Let the operating system count `steps` steps of every baseline. Only in a world with `link`.

    bytes: that left the rank's interface, in whole frames; payload: without headers. ring: what the ring formula says
    of the collectives dispatched meanwhile; reduce_scatter: the part of it that torch calls by this name.
    """
    grid, found = Grid.of(world), {}
    corpus = pixels(grid, workload.context)
    for name in admitted(workload, world.dp, world.tp, COUNTED):
        trainer, data = warmed_up(name, workload, grid, corpus)
        with CollectiveCounter() as counter:
            before = settled()
            for _ in range(steps):
                trainer.step(next(data))
            left = settled().since(before)
        found[name] = {"bytes": left.bytes, "packets": left.packets, "payload": left.payload}
        found[name]["ring"] = counter.ledger.total().sent_bytes
        found[name]["reduce_scatter"] = counter.ledger.total(op="reduce_scatter").sent_bytes
    return found


def settled() -> network_emulation.Sent:
    """Return this rank's counter once every rank is here and the links are quiet."""
    dist.barrier()
    time.sleep(SETTLE)
    return network_emulation.sent()


def wire_on(dp: int, tp: int, shape: str = "even", steps: int = STEPS) -> list[dict[str, Any]]:
    """Return one row per baseline: what left all interfaces together, and at the ranks, over the ring formula's bytes.

    Needs `network_emulation.setup_bridge`. payload: frames without the 66 bytes of headers of every packet. on_gloo,
    least_rank, greatest_rank: over what it is if gloo carries out a reduce-scatter that torch calls as an all-reduce.
    """
    given, link = (SHAPES[shape].shared_by(dp), steps), network_emulation.Link()
    ranks = network_emulation.run(count_wire, given, dp=dp, tp=tp, link=link)
    rows = []
    for name in ranks[0]:
        found = [rank[name] for rank in ranks]
        total = {key: sum(rank[key] for rank in found) for key in found[0]}
        each = [rank["payload"] / (rank["ring"] + rank["reduce_scatter"]) for rank in found]
        rows.append({
            "dp": dp, "tp": tp, "baseline": name, **total,
            "ratio": total["payload"] / total["ring"],
            "on_gloo": total["payload"] / (total["ring"] + total["reduce_scatter"]),
            "least_rank": min(each), "greatest_rank": max(each),
        })  # fmt: skip
    return rows


def wire_lines(rows: Rows) -> list[str]:
    """Return `wire_on`'s rows of several grids, a line per baseline: the least and the greatest of its ratios."""
    lines = [
        "Bytes that left all ranks' network interfaces, without headers, divided by",
        "  called    what the ring formula says of the collectives that torch called",
        "  gloo's    the same, if every reduce-scatter that torch called is an all-reduce",
        "Each is the least and the greatest ratio of all grids.",
        "",
        "     called       gloo's",
    ]
    for name, baseline in RUNNABLE.items():
        mine = [row for row in rows if row["baseline"] == name]
        if mine:
            spans = [(min(row[key] for row in mine), max(row[key] for row in mine)) for key in ("ratio", "on_gloo")]
            told = "".join(f"{low:.3f}-{high:.3f}  " for low, high in spans)
            lines.append(f"{told}{baseline.title}")
    return lines


# ---- All of it --------------------------------------------------------------------------------------------


def measure(quick: bool, obstacle: str | None) -> dict[str, Any]:
    """Take every measurement of the chapter. obstacle: why there are no networks for the ranks; None if there are."""
    grids, ratio_grids, wire_grids, fsdp2 = GRIDS, RATIO_GRIDS, WIRE_GRIDS, [2, 4, 8]
    if quick:
        grids, ratio_grids, wire_grids, fsdp2 = [(2, 1), (2, 2)], [(2, 1)], [(2, 2)], [2]
    counted = counts_on(grids)
    print(*counted["faults"], sep="\n", end="\n" * bool(counted["faults"]))
    return {
        "counted": counted,
        "ratios": [row for dp, tp in ratio_grids for row in ratios_on(dp, tp)],
        "compared": [row for dp, tp in ratio_grids for row in compared_on(dp, tp)],
        "fsdp2": [fsdp2_on(dp) for dp in fsdp2],
        "header_bytes": network_emulation.HEADER,
        "obstacle": obstacle,
        "wire": None if obstacle else [row for dp, tp in wire_grids for row in wire_on(dp, tp)],
    }
