"""Chapter 12's stored measurements: worlds of every grid up to eight ranks, each counted in every way.

Functions named `on_rank_...` run on every rank; the others start worlds. Keys are those of book/results/bytes.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from distmuon import launch
from distmuon.launch import session
from distmuon.launch.hosts import HEADER, Link
from muonbook.measure.workload import SHAPES, Workload

if TYPE_CHECKING:
    from distmuon.launch import World
    from muonbook.ch12.byte_counts import OnTheWire

Grids = Sequence[tuple[int, int]]

GRIDS = [(dp, tp) for dp in range(1, 9) for tp in range(1, 9) if dp * tp <= 8]
TOLERANCE = 0.03  # of what the ring formula says, beyond which the wire disagrees with it
STEPS = 3  # of each contender, that the operating system counts

# how the parameters are stored (gradients are always reduced in float32), and how the momentum travels
DTYPES: dict[str, dict[str, Any]] = {
    "fp32, momentum bf16": {"dtype": "float32"},
    "bf16, momentum bf16": {"dtype": "bfloat16"},
    "fp32, momentum fp32": {"dtype": "float32", "gather_dtype": "float32"},
}
G, W, M = 4, {"float32": 4, "bfloat16": 2}, {None: 2, "float32": 4}  # bytes per element

RATIO_GRIDS = [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)]
WIRE_GRIDS = [(4, 1), (3, 1), (8, 1), (2, 2), (4, 2)]


def shapes_on(dp: int, tp: int) -> dict[str, Workload]:
    """Return the model shapes that can be cut over this grid, each with one sequence per DP rank and step."""
    shared = {shape: workload.shared_by(dp) for shape, workload in SHAPES.items()}
    return {shape: workload for shape, workload in shared.items() if workload.fits(dp, tp)}


# ---- Predicted, ledger, dispatched, recorded --------------------------------------------------------------


def on_rank_count(world: World, workloads: Mapping[str, Workload]) -> list[Any] | None:
    """Return, on rank 0, what every rank counted; for `byte_counts.count_all`."""
    from distmuon.sharding.grid import Grid
    from muonbook.ch12.byte_counts import count_all

    return world.gather(count_all(Grid.of(world), workloads))


def count_grids(grids: Grids) -> dict[str, Any]:
    """Count every contender and shape on every grid; return how much was held against each other."""
    rows, faults = [], []
    for dp, tp in grids:
        workloads = shapes_on(dp, tp)
        ranks = launch.run(on_rank_count, (workloads,), dp=dp, tp=tp)[0]
        steps = [counted for rank in ranks for counted in rank.values()]
        found = [f"{dp} x {tp}, {which}: {fault}" for r in ranks for which, c in r.items() for fault in c.faults()]
        rows.append({
            "dp": dp, "tp": tp, "shapes": list(workloads), "steps": len(steps),
            "collectives": sum(kind.calls for counted in steps for kind in counted.recorded.values()),
            "records": sum(counted.sounding_right for counted in steps),
            "equal": not found,
        })  # fmt: skip
        faults += found
    return {"grids": rows, "faults": faults[:20], "equal": not faults}


# ---- Muon / ZeRO-1 AdamW ----------------------------------------------------------------------------------


def on_rank_ratios(world: World, workloads: Sequence[Workload]) -> list[Any] | None:
    from distmuon.sharding.grid import Grid
    from muonbook.ch12.byte_counts import count_optimizers

    grid = Grid.of(world)
    return world.gather([count_optimizers(grid, workload) for workload in workloads])


def ratios_on(dp: int, tp: int, shape: str = "even") -> list[dict[str, Any]]:
    """Return one row per dtypes of Muon / ZeRO-1 AdamW on this grid, means over ranks: by formula, and as counted.

    matrices: counted in buckets of one parameter each, so that what belongs to matrices can be told apart.
    whole: everything the two optimizers send, buckets as they are, embeddings and norms included.
    """
    from muonbook.measure import formulas

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
    ranks = launch.run(on_rank_ratios, (workloads,), dp=dp, tp=tp)[0]
    for number, row in enumerate(rows):
        for which, at, column in (("matrices", 2 * number, 0), ("whole", 2 * number + 1, 1)):
            muon_sent, adamw_sent = (sum(rank[at][name][column] for rank in ranks) for name in ("muon", "zero1"))
            row[which] = muon_sent / adamw_sent
    return rows


# ---- torch's own Muon -------------------------------------------------------------------------------------


def on_rank_fsdp2(world: World, workload: Workload) -> list[Any] | None:
    from distmuon.sharding.grid import Grid
    from muonbook.ch12.byte_counts import count_fsdp2, stray_fsdp2

    grid = Grid.of(world)
    return world.gather((*count_fsdp2(grid, workload), stray_fsdp2(grid, workload)))


def fsdp2_on(dp: int, shape: str = "even") -> dict[str, Any]:
    """Return what torch.optim.Muon on FSDP2 calls and sends in a step, on rank 0, beside our Muon's prediction.

    update: by Muon and AdamW. model: by forward and backward, which gather parameters (ZeRO-3) and reduce gradients.
    gather_all_momentum: our Muon's momentum gathers alone. stray, rounding: `byte_counts.stray_fsdp2`'s.
    """
    from muonbook.measure.baselines import predict_muon

    workload = SHAPES[shape].shared_by(dp)
    with session.environment(session.directory()):  # planning makes torch leave a folder behind
        matrices, ours = len(workload.plan(dp, 1)[1]), predict_muon(workload, dp, 1, 0)
    ranks = launch.run(on_rank_fsdp2, (workload,), dp=dp)[0]
    model, update = (ledger.total() for ledger in ranks[0][:2])
    momentum = sum(traffic.sent_bytes for entry, traffic in ours if entry.label.startswith("momentum"))
    return {
        "dp": dp, "shape": shape, "matrices": matrices,
        "update_calls": update.calls, "update_sent": update.sent_bytes,
        "model_calls": model.calls, "model_sent": model.sent_bytes,
        "gather_all_momentum": momentum, "gather_all_sent": ours.total().sent_bytes,
        **{key: max(strays[key] for *_, strays in ranks) for key in ("stray", "rounding")},
    }  # fmt: skip


# ---- The operating system ---------------------------------------------------------------------------------


def on_rank_wire(world: World, workload: Workload, steps: int) -> list[Any] | None:
    from distmuon.sharding.grid import Grid
    from muonbook.ch12.byte_counts import count_wire
    from muonbook.measure.baselines import CONTENDERS
    from muonbook.measure.workload import pixels

    grid = Grid.of(world)
    corpus = pixels(grid, workload.context)
    names = [name for name, contender in CONTENDERS.items() if contender.admits(workload, world.dp, world.tp)]
    return world.gather({name: count_wire(name, workload, grid, corpus, steps) for name in names})


def wire_on(dp: int, tp: int, shape: str = "even", steps: int = STEPS) -> list[dict[str, Any]]:
    """Return one row per contender: what left all interfaces together, and at the ranks, over the ring formula's bytes.

    Needs `hosts.become_switch`. payload: frames without the 66 bytes of headers of every packet.
    """
    ranks = launch.run(on_rank_wire, (SHAPES[shape].shared_by(dp), steps), dp=dp, tp=tp, link=Link())[0]
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
        "counted": count_grids(grids),
        "ratios": [row for dp, tp in ratio_grids for row in ratios_on(dp, tp)],
        "fsdp2": [fsdp2_on(dp) for dp in fsdp2],
        "header_bytes": HEADER,
        "obstacle": obstacle,
        "wire": None if obstacle else [row for dp, tp in wire_grids for row in wire_on(dp, tp)],
    }
