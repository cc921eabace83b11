"""The survey of planned worlds, one dict for book/results/worlds.json: models x ranks x links x batches x algorithms.

Beside it the world in which a claim was made, with Moonlight's own batches. Deterministic; no process is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from muonbook.ch15.worlds.planned_steps import Grids, Step, best, seconds, square_cost, timed_grids
from muonbook.ch15.worlds.verdicts import short, verdict
from muonbook.planner.algorithms import ALGORITHMS
from muonbook.planner.fabrics import CORNERS, FABRICS, PEAK_FLOPS, SOURCES, SUSTAINED
from muonbook.planner.model_shapes import MODELS, SURVEYED
from muonbook.planner.planned_worlds import BUCKET_RULES, PlannedWorld, grids, plan_world

SQUARES = (16, 64)  # for "DP = TP" alone
WORLDS = (16, 32, 64, 128, 512, 1024, 4096)
TOKENS = (1 << 20, 1 << 22, 1 << 24)  # of all ranks, per step
QUICK = (("gpt2", "llama3_8b"), (32, 1024), (1 << 22,))
MOONLIGHT_RANKS = (16, 32, 64, 128, 256)
MOONLIGHT_TOKENS = (2048 * 8192, 4096 * 8192)  # per step: Liu et al. 2025, section 3.3
FAST = "nvlink_infiniband"


def survey(quick: bool = False) -> dict[str, Any]:
    """Return everything that chapter 15 says about planned worlds."""
    models, worlds, tokens = QUICK if quick else (SURVEYED, WORLDS, TOKENS)
    layouts, cells = [], []
    for model in models:
        for ranks in worlds:
            layouts += layouts_of(model, ranks) if ranks not in SQUARES else []
            cells += cells_of(model, ranks, tokens)
    return {
        "assumptions": assumptions(),
        "algorithms": {name: each.title for name, each in ALGORITHMS.items()},
        "models": {name: _model(name) for name in models},
        "layouts": layouts,
        "cells": cells,
        "verdict": verdict(cells, layouts),
        "moonlight": moonlight(MOONLIGHT_RANKS[:1] if quick else MOONLIGHT_RANKS),
    }


def assumptions() -> dict[str, Any]:
    """Return what was assumed of links and devices."""
    links = {
        name: {"title": f.title, "node": f.node, "inside": f.inside.__dict__, "between": f.between.__dict__}
        for name, f in FABRICS.items()
    }
    return {"peak_flops": PEAK_FLOPS, "sustained": SUSTAINED, "fabrics": links, "sources": SOURCES}


def _model(name: str) -> dict[str, Any]:
    shape = MODELS[name]
    specs, muon = shape.specs(1)
    whole = plan_world(shape, 1, 1, BUCKET_RULES["ours"](1))
    once = sum(row.load.flops for _, rows in whole.matrices for row in rows)
    return {
        "title": shape.title,
        "source": shape.source,
        "parameters": shape.parameters,
        "active": shape.active,
        "matrices": len(muon),
        "share_for_muon": short(sum(specs[i].numel for i in muon) / shape.parameters),
        # Newton–Schulz of every matrix once, over forward and backward of a million tokens: what gather_all repeats
        "newton_schulz_once_per_million_tokens": short(once / (6 * shape.active * 1e6)),
    }


# ---- Layouts ----------------------------------------------------------------------------------------------


def layouts_of(model: str, ranks: int) -> list[dict[str, Any]]:
    """Return what layouts say by themselves, without links, for every grid and bucket rule."""
    return [
        {"model": model, "ranks": ranks, "dp": dp, "tp": tp, "rule": rule}
        | facts(plan_world(MODELS[model], dp, tp, BUCKET_RULES[rule](dp)))
        for dp, tp in grids(MODELS[model], ranks)
        for rule in BUCKET_RULES
    ]


def facts(world: PlannedWorld) -> dict[str, Any]:
    """Return bytes per rank and step, work, memory, of `gather_all`, and the bytes of `gather_cut`, on one layout."""
    ledger, (mean, most), (redundancy, most_ranks) = world.ledger(), world.total_load(), world.redundancy
    zero1 = world.ledger(muon=False).total().sent_bytes
    same = ledger.total(group="dp").sent_bytes + ledger.total(group="world").sent_bytes
    return {
        "buckets": len(world.layout.buckets),
        "zero1_bytes": zero1,
        "gather_all_bytes": round(same + mean.sent_bytes),
        "gather_all_bytes_most": round(same + most.sent_bytes),
        "gather_all_over_zero1": short((same + mean.sent_bytes) / zero1),
        "gather_cut_over_zero1": short((zero1 + world.gather_cut_bytes + mean.sent_bytes) / zero1),
        "spread": short(world.spread),
        "redundancy": short(redundancy),
        "redundancy_most": most_ranks,
        "newton_schulz_flops": short(mean.flops),
        "newton_schulz_flops_most": short(most.flops),
        "state_bytes": world.state_bytes,
        "transient_bytes": world.transient_bytes,
    }


# ---- Cells ------------------------------------------------------------------------------------------------


def cells_of(model: str, ranks: int, batches: Iterable[int]) -> list[dict[str, Any]]:
    """Return one row per algorithm, batch and fabric: which T is best, and what Muon adds there."""
    return [
        {"model": model, "ranks": ranks, "tokens": tokens, "fabric": fabric, "algorithm": name}
        | _cell(by_t, fabric, tokens)
        for name, algorithm in ALGORITHMS.items()
        for by_t in [timed_grids(model, ranks, algorithm)]
        for tokens in batches
        for fabric in FABRICS
    ]


def _cell(by_t: Grids, fabric_name: str, tokens: int) -> dict[str, Any]:
    enough = {tp: timed for tp, timed in by_t.items() if timed.admits(tokens)}
    fitting = {tp: timed for tp, timed in enough.items() if timed.fits}
    if not fitting:
        return {"tp": None, "why": "no batch" if not enough else "no room"}
    fabric = FABRICS[fabric_name]
    took = {aim: seconds(fitting, fabric, tokens, aim) for aim in ("step", "communication")}
    chosen = {aim: best(each) for aim, each in took.items()}
    return {
        "tp": chosen["step"],
        "tp_choices": " ".join(map(str, fitting)),
        "has_room": fitting[chosen["step"]].has_room,
        "tp_for_communication": chosen["communication"],
        "square_cost": short(square_cost(fitting, took["step"])),
        "square_cost_communication": short(square_cost(fitting, took["communication"])),
    } | shares(fitting[chosen["step"]].step(fabric, tokens))


def shares(step: Step) -> dict[str, float | None]:
    """Return what Muon adds to a step, by three measures."""
    return {
        "over_adamw": short(step.muon / step.adamw),
        "over_forward_backward": short(step.extra),
        "newton_schulz_share": short(step.newton_schulz / step.muon),
    }


# ---- Worlds in which a claim was made ---------------------------------------------------------------------


def moonlight(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return what Muon adds to Moonlight's own batches on NVLink and InfiniBand, by ranks and algorithm, at the best T.

    Nothing is recomputed, so that forward and backward are what the paper's sentence is about.

    extra: over AdamW laid out alike; optimizer: all that is not forward and backward. Both over forward and backward.
    extra_least, extra_most: with every assumption doubled or halved, in every mix.
    """
    rows, fabric = [], FABRICS[FAST]
    for name, algorithm in ALGORITHMS.items():
        for ranks in sizes:
            by_t = timed_grids("moonlight", ranks, algorithm, recompute=False)
            fitting = {tp: timed for tp, timed in by_t.items() if timed.fits}
            for tokens in MOONLIGHT_TOKENS if fitting else ():
                tp = best(seconds(fitting, fabric, tokens, "step"))
                step = fitting[tp].step(fabric, tokens)
                mixed = [fitting[tp].step(fabric.scaled(scale), tokens).extra for scale in CORNERS]
                rows.append(
                    {"algorithm": name, "ranks": ranks, "tokens": tokens, "tp": tp}
                    | {"has_room": fitting[tp].has_room}
                    | {"extra": short(step.extra), "optimizer": short(step.optimizer)}
                    | {"extra_least": short(min(mixed)), "extra_most": short(max(mixed))}
                )
    return rows
