"""The projection of the report "Reproducing and Validating Distributed Muon" to several nodes, redone four ways.

    printed   the report's own sum (its table of section 7): forward and backward, plus `slower` times all events that
              match a collective's name, plus the optimizer's time on the host; all of rank 0
    once      elapsed time, without the pause in AdamW's first product, and every collective counted once
    whole     computation, and all bytes of a whole ZeRO-1 step at the rate at which AdamW's all-reduces went
    nodes     the same on two nodes of two GPUs, where only the way between the nodes is slower

All are milliseconds of the report's five steps, by `measure.reported`'s bytes and the public traces' times; in `whole`
and `nodes` a rank's computation is that of the traces, whatever the grid.
"""

from __future__ import annotations

from typing import Any

from distmuon.verify.prediction import predict_step
from muonbook.measure import reported, results
from muonbook.planner.cost_model import LinkCost, collectives_of, step_seconds
from muonbook.planner.fabrics import ADAPTER, PCIE, Fabric

STEPS = 5  # of the report's runs
TIMES_SLOWER = 3  # than between the report's GPUs, as its projection assumes
RUNS = {"muon": "trace_muon_FULLSTEP_dp2_tp2", "adamw": "trace_adamw_FULLSTEP"}
GRIDS = {"muon": (2, 2), "adamw": (4, 1), "adamw_same_grid": (2, 2)}  # DP, TP


def projection() -> dict[str, Any]:
    """Return "parts", what the report adds up; "gigabytes_per_second" of a link; and per way its times and ratios."""
    found = results.load("report_traces")
    runs = {each["run"]: each for each in found["runs"]}
    means = {name: runs[run] for name, run in RUNS.items()}
    parts = {name: printed_parts(found["traces"][f"{run}_rank0"]) for name, run in RUNS.items()}
    rate = STEPS * reported.all_reduces(4) / (means["adamw"]["transfer_ms"] / 1000)

    def printed(name: str, slower: int) -> float:
        mine = parts[name]
        return float(mine["passes_ms"] + slower * mine["communication_ms"] + mine["optimizer_ms"])

    def once(name: str, slower: int) -> float:
        return float(means[name]["span_without_pause_ms"] + (slower - 1) * means[name]["communication_ms"])

    def whole(name: str, slower: int) -> float:
        link = LinkCost(PCIE.alpha_seconds, rate / slower)
        return planned(name, Fabric("equal links", link, link, node=4))

    def nodes(name: str, slower: int) -> float:
        inside, between = LinkCost(PCIE.alpha_seconds, rate), LinkCost(ADAPTER.alpha_seconds, rate / slower)
        return planned(name, Fabric("two nodes of two", inside, between, node=2))

    def planned(name: str, fabric: Fabric) -> float:
        return means[name.partition("_")[0]]["computation_ms"] + sent_ms(name, fabric)

    ways = {
        way.__name__: {
            f"x{slower}": with_ratios({name: way(name, slower) for name in names}) for slower in (1, TIMES_SLOWER)
        }
        for way, names in ((printed, RUNS), (once, RUNS), (whole, GRIDS), (nodes, GRIDS))
    }
    return {"parts": parts, "gigabytes_per_second": rate / 1e9, **ways}


def printed_parts(rank: dict[str, Any]) -> dict[str, float]:
    """Return what the report's table of a step adds up, and the time that it gives for the whole.

    Forward and backward: the mean of a range's time on the host and on the GPU, as its script's halved sum is.
    """
    ranges = {each["name"].removeprefix("Muon_").removeprefix("AdamW_"): each for each in rank["ranges"]}
    passes = ranges["FWD_BWD"]
    return {
        "passes_ms": (passes["cpu_ms"] + passes["gpu_ms"]) / 2,
        "communication_ms": rank["name_matched_ms"],
        "optimizer_ms": ranges["Step"]["cpu_ms"],
        "measured_ms": ranges["Full_Training_Step"]["cpu_ms"],
    }


def sent_ms(name: str, fabric: Fabric) -> float:
    """Return how long five whole ZeRO-1 steps of the report's matrices send, on the DP rank that takes longest."""
    dp, tp = GRIDS[name]
    layout, sizes = reported.plan_model(dp, tp), {"dp": dp, "tp": tp, "world": dp * tp}
    muon = range(len(layout.specs)) if name == "muon" else ()
    ledgers = [predict_step(layout, tp, rank, muon) for rank in range(dp)]
    longest = max(step_seconds(0.0, collectives_of(each, sizes), fabric.links(dp, tp)) for each in ledgers)
    return 1000 * STEPS * longest


def with_ratios(times: dict[str, float]) -> dict[str, float]:
    """Return the times, and Muon's over those of each AdamW."""
    return times | {f"over_{name}": times["muon"] / times[name] for name in times if name != "muon"}
