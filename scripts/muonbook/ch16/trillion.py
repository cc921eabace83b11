"""A mixture of experts with a trillion parameters, dealt out over thousands of ranks by one process."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from distmuon.launch import World
from distmuon.optim import strategies
from distmuon.optim.newton_schulz import flops
from distmuon.sharding import layout as maps
from distmuon.sharding.layout import DEFAULT_BUCKET_SIZE, Layout
from distmuon.verify.prediction import predict_step, predict_work
from muonbook.planner.measured.planning import took
from muonbook.planner.model_shapes import MODELS

DP, TP = 1024, 8
MODEL = MODELS["kimi_k2"]


def plan() -> tuple[Layout, Sequence[int], dict[tuple[int, int], int]]:
    """Return the map, the indices of Muon's parameters, and the work of every rank (dp, tp), in FLOPs."""
    specs, muon = MODEL.specs(TP)
    layout = strategies.planner("owner")(specs, muon, DP, TP, DEFAULT_BUCKET_SIZE)
    return layout, muon, predict_work("owner", layout, TP, muon)


def lines() -> list[str]:
    """Plan the model; return what was found."""
    layout, muon, work = plan()
    adamw = predict_step(maps.plan(layout.specs, DP), TP, 0)
    ledger = predict_step(layout, TP, 0, muon, "owner")
    fair = sum(work.values()) / len(work)
    more = ledger.total().sent_bytes / adamw.total().sent_bytes
    sizes = sorted(flops(layout.specs[index].full_shape(TP)) for index in muon)
    return [
        f"{MODEL.parameters / 1e12:.2f} trillion parameters; {len(muon):,} matrices for {DP:,} x {TP} ranks",
        f"Newton–Schulz of the largest matrix takes as much work as {sizes[-1] / median(sizes):.0f} of the typical one",
        f"owners: slowest / fair share {max(work.values()) / fair:.3f}; without work: {list(work.values()).count(0)}",
        f"owners: shards are padded by {layout.padding:.1%}",
        f"owners: rank 0 sends {float(more):.3f} times the bytes of ZeRO-1 AdamW's step",
        f"gather_all: Newton–Schulz of each matrix {repeated():.0f} times",
    ]


def measure(world: World) -> dict[str, float]:
    """Return what planning takes: seconds, and the most memory that this process ever held."""
    return took(plan)


def repeated() -> float:
    """Return how often gather_all would orthogonalize each matrix, by work: once on every rank that owns a piece."""
    specs, muon = MODEL.specs(TP)
    layout = strategies.planner("gather_all")(specs, muon, DP, TP, DEFAULT_BUCKET_SIZE)
    of_muon = {index: flops(specs[index].full_shape(TP)) for index in muon}
    ranks = {i: TP * len(layout.owners(bucket, i)) for bucket in layout.buckets for i in bucket.params if i in of_muon}
    return sum(ranks[i] * work for i, work in of_muon.items()) / sum(of_muon.values())
