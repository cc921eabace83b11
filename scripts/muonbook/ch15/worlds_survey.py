"""The survey of planned worlds: models x worlds x grids x links x batches, as one dict for book/results/worlds.json.

Beside it the worlds in which a claim was made: Moonlight's own batches, the report's ranks, and gather_cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from distmuon.sharding.layout import ParamSpec, plan
from distmuon.verify.prediction import predict_step
from muonbook.ch15.planned_steps import Grids, Step, TimedWorld, best, robustness, seconds, square_cost, sweet_spot
from muonbook.measure import reported
from muonbook.planner.cost_model import collectives_of, step_seconds
from muonbook.planner.fabrics import CORNERS, FABRICS, ONE_AT_A_TIME, PEAK_FLOPS, SOURCES, SUSTAINED
from muonbook.planner.model_shapes import MODELS, SURVEYED
from muonbook.planner.planned_worlds import BUCKET_RULES, TIMED_RULE, PlannedWorld, grids, plan_world

SQUARES = (16, 64)  # for "DP = TP" alone
RULES = ("ours", "megatron")
WORLDS = (16, 32, 64, 128, 512, 1024, 4096)
TOKENS = (1 << 20, 1 << 22, 1 << 24)  # of all ranks, per step
QUICK = (("gpt2", "llama3_8b"), (32, 1024), (1 << 22,))
MOONLIGHT_RANKS = (16, 32, 64, 128)
MOONLIGHT_TOKENS = (2048 * 8192, 4096 * 8192)  # per step: Liu et al. 2025, section 3.3
REPORTED_GRIDS = ((4, 1), (2, 2), (1, 4))  # of the report's four ranks


def survey(quick: bool = False) -> dict[str, Any]:
    """Return everything that chapter 15 says about planned worlds. Deterministic; no process is started."""
    models, worlds, tokens = QUICK if quick else (SURVEYED, WORLDS, TOKENS)
    layouts, cells, timed = [], [], {}
    for model in models:
        for ranks in worlds:
            by_t = {}
            for dp, tp in grids(MODELS[model], ranks):
                for rule in RULES:
                    world = plan_world(MODELS[model], dp, tp, BUCKET_RULES[rule](dp))
                    if ranks not in SQUARES:
                        place = {"model": model, "ranks": ranks, "dp": dp, "tp": tp, "rule": rule}
                        layouts.append(place | facts(world))
                    if rule == TIMED_RULE:
                        by_t[tp] = TimedWorld.of(world)
            timed[model, ranks] = by_t
            cells += [cell for batch in tokens for cell in _cells(model, ranks, by_t, batch)]
    return {
        "assumptions": assumptions(),
        "models": {name: _model(name) for name in models},
        "layouts": layouts,
        "cells": cells,
        "verdict": verdict(cells, timed),
        "moonlight": moonlight(),
        "reported": reported_world(),
        "gather_cut_340m": gather_cut_340m(),
    }


def assumptions() -> dict[str, Any]:
    """Return what was assumed of links and devices."""
    links = {
        name: {"title": f.title, "node": f.node, "inside": f.inside.__dict__, "between": f.between.__dict__}
        for name, f in FABRICS.items()
    }
    return {
        "peak_flops": PEAK_FLOPS,
        "sustained": SUSTAINED,
        "fabrics": links,
        "sources": SOURCES,
        "timed_rule": TIMED_RULE,
    }


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


def facts(world: PlannedWorld) -> dict[str, Any]:
    """Return what a planned layout says by itself, without links: bytes per rank and step, work, memory."""
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


def _cells(model: str, ranks: int, by_t: Grids, tokens: int) -> Iterable[dict[str, Any]]:
    """Yield one row per fabric: which T is best, how sure that is, and what Muon adds there."""
    enough = {tp: timed for tp, timed in by_t.items() if timed.admits(tokens)}
    fitting = {tp: timed for tp, timed in enough.items() if timed.fits}
    for name, fabric in FABRICS.items():
        place = {"model": model, "ranks": ranks, "tokens": tokens, "fabric": name}
        if not fitting:
            yield place | {"tp": None, "why": "no batch" if not enough else "no room"}
            continue
        anyhow = best(seconds(enough, fabric, tokens, "step"))
        took = {aim: seconds(fitting, fabric, tokens, aim) for aim in ("step", "communication", "overlapped")}
        adamws = {tp: timed for tp, timed in enough.items() if timed.adamw_fits}
        took["adamw"] = seconds(adamws, fabric, tokens, "adamw")
        chosen = {aim: best(each) for aim, each in took.items()}
        step, sure = fitting[chosen["step"]].step(fabric, tokens), robustness(fitting, fabric, tokens, "step", CORNERS)
        yield (
            place
            | {
                "tp": chosen["step"],
                "tp_choices": " ".join(map(str, fitting)),
                "tp_in_endless_memory": anyhow,
                "tp_for_communication": chosen["communication"],
                "tp_for_adamw": chosen["adamw"],
                "tp_overlapped": chosen["overlapped"],
                "square_cost": short(square_cost(fitting, took["step"])),
                "square_cost_communication": short(square_cost(fitting, took["communication"])),
                "over_best_adamw": short(step.muon / min(took["adamw"].values())),
                "holds": short(sure.holds),
                "regret": short(sure.regret),
            }
            | _shares(step)
        )


def _shares(step: Step) -> dict[str, Any]:
    return {
        "over_adamw": short(step.muon / step.adamw),
        "over_forward_backward": short(step.extra),
        "newton_schulz_share": short(step.newton_schulz / step.muon),
        "optimizer_share": short(1 - (step.computation + step.activations) / step.muon),
    }


def verdict(cells: list[dict[str, Any]], timed: Mapping[tuple[str, int], Grids]) -> dict[str, Any]:
    """Return what all cells together say about "DP = TP", and how often a factor of two changes the winner."""
    found = [cell for cell in cells if cell["tp"] is not None]
    choice = [cell for cell in found if len(_choices(cell)) > 1]
    square = [cell for cell in choice if cell["square_cost"] is not None]
    open_end = [cell for cell in square if max(_choices(cell)) ** 2 > 2 * cell["ranks"]]  # T > D is possible too
    changes = {
        label: _share(
            1 - robustness(_chosen(timed, cell), FABRICS[cell["fabric"]], cell["tokens"], "step", [scale]).holds
            for cell in choice
        )
        for label, scale in ONE_AT_A_TIME.items()
    }
    return {
        "cells": len(cells),
        "with_a_grid": len(found),
        "with_a_choice": len(choice),
        "adds_at_most_3_percent": {  # to forward and backward: the upper end of the paper's claim
            f"{tokens:,} tokens": _share(c["over_forward_backward"] <= 0.03 for c in found if c["tokens"] == tokens)
            for tokens in sorted({cell["tokens"] for cell in found})
        },
        "least_tp_wins_step": _share(cell["tp"] == min(_choices(cell)) for cell in choice),
        "most_tp_wins_step": _share(cell["tp"] == max(_choices(cell)) for cell in choice),
        "most_tp_wins_communication": _share(cell["tp_for_communication"] == max(_choices(cell)) for cell in choice),
        "adamw_wants_the_same": _share(cell["tp"] == cell["tp_for_adamw"] for cell in choice),
        "adamw_wants_less_tp": _share(cell["tp"] > cell["tp_for_adamw"] for cell in choice),
        "adamw_wants_more_tp": _share(cell["tp"] < cell["tp_for_adamw"] for cell in choice),
        "overlap_wants_the_same": _share(cell["tp"] == cell["tp_overlapped"] for cell in choice),
        "memory_decides": _share(cell["tp"] != cell["tp_in_endless_memory"] for cell in found),
        "square_possible": len(square),
        "square_worlds": len({(cell["model"], cell["ranks"]) for cell in square}),
        "square_wins_step": _share(cell["square_cost"] == 0 for cell in square),
        "square_wins_communication": _share(cell["square_cost_communication"] == 0 for cell in square),
        "square_and_more_tp_possible": len(open_end),
        "square_wins_communication_then": _share(cell["square_cost_communication"] == 0 for cell in open_end),
        "square_cost_median": short(median([cell["square_cost"] for cell in square])) if square else None,
        "square_cost_worst": max((cell["square_cost"] for cell in square), default=None),
        "winner_holds_in_all_corners": _share(cell["holds"] == 1 for cell in choice),
        "winner_holds": _share(cell["holds"] for cell in choice),
        "regret_worst": max((cell["regret"] for cell in choice), default=None),
        "winner_changes": changes,
        "sweet_spot_one_wire": {str(ranks): short(sweet_spot(ranks)) for ranks in WORLDS},
    }


def _choices(cell: dict[str, Any]) -> list[int]:
    return [int(tp) for tp in cell["tp_choices"].split()]


def _chosen(timed: Mapping[tuple[str, int], Grids], cell: dict[str, Any]) -> Grids:
    return {tp: timed[cell["model"], cell["ranks"]][tp] for tp in _choices(cell)}


def _share(values: Iterable[float]) -> float | None:
    found = [float(value) for value in values]
    return short(sum(found) / len(found)) if found else None


def short(value: float | None) -> float | None:
    """Return a number with four digits, for the assumptions hold for fewer; None stays."""
    return None if value is None else float(f"{value:.4g}")


# ---- Worlds in which a claim was made ---------------------------------------------------------------------


def moonlight() -> list[dict[str, Any]]:
    """Return what Muon adds to Moonlight's own batches on NVLink and InfiniBand, by ranks, at the best T.

    extra: over ZeRO-1 AdamW; optimizer: all that is not forward and backward. Both over forward and backward.
    """
    rows, fabric = [], FABRICS["nvlink_infiniband"]
    for ranks in MOONLIGHT_RANKS:
        sizes = {tp: (dp, BUCKET_RULES[TIMED_RULE](dp)) for dp, tp in grids(MODELS["moonlight"], ranks)}
        worlds = {tp: TimedWorld.of(plan_world(MODELS["moonlight"], dp, tp, size)) for tp, (dp, size) in sizes.items()}
        fitting = {tp: timed for tp, timed in worlds.items() if timed.fits}
        for tokens in MOONLIGHT_TOKENS:
            tp = best(seconds(fitting, fabric, tokens, "step"))
            step = fitting[tp].step(fabric, tokens)
            row = {"extra": short(step.extra), "optimizer": short(step.optimizer)}
            rows.append({"ranks": ranks, "tokens": tokens, "tp": tp} | row)
    return rows


def reported_world() -> list[dict[str, Any]]:
    """Return what the report's own five matrices ask of four ranks over PCIe, on each grid: see `reported`.

    bytes: of the rank that sends most. seconds: of sending alone, over those of the quickest grid.
    """
    took = {}
    for dp, tp in REPORTED_GRIDS:
        layout = reported.plan_model(dp, tp)
        links, sizes = FABRICS["pcie_ethernet"].links(dp, tp), {"dp": dp, "tp": tp, "world": dp * tp}
        ledgers = [predict_step(layout, tp, rank, range(len(layout.specs))) for rank in range(dp)]
        took[dp, tp] = max(step_seconds(0.0, collectives_of(ledger, sizes), links) for ledger in ledgers)
    return [
        {
            "dp": dp,
            "tp": tp,
            "bytes": max(sent.muon for sent in reported.steps(dp, tp)),
            "seconds": short(took[dp, tp] / min(took.values())),
        }
        for dp, tp in REPORTED_GRIDS
    ]


def gather_cut_340m() -> list[dict[str, Any]]:
    """Return the arithmetic for gather_cut on 12 layers of width 1536 (48 matrices, qkv fused), one bucket, fp32."""
    width, rows = 1536, []
    shapes = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
    specs = [
        ParamSpec(f"{layer}.{name}", (width * a, width * b), "float32")
        for layer in range(12)
        for name, (a, b) in shapes.items()
    ]
    for dp in (2, 8, 32, 64, 256):
        muon = frozenset(range(len(specs)))
        world = PlannedWorld(None, dp, 1, plan(specs, dp, sum(spec.numel for spec in specs)), muon)
        zero1 = world.ledger(muon=False).total(group="dp").sent_bytes
        ratio = (zero1 + world.gather_cut_bytes) / zero1
        rows.append({"dp": dp, "bytes_over_zero1": round(ratio, 3), "redundancy": round(world.redundancy[0], 2)})
    return rows
