"""What `make bench NAMES=muonw` measures: the step beside torch's, what saving and watching cost, how logits grow."""

from __future__ import annotations

from typing import Any

from distmuon import launch
from muonbook.ch17 import logit_growth

RACE, SAVE = "muonbook.ch17.costs.mesh_race:race", "muonbook.ch17.costs.save_cost:cost"
WATCH = "muonbook.ch17.costs.metrics_cost:cost"
WATCHED = (("MuonW", 1), ("MuonW", 2), ("DistributedMuon", 2))  # optimizer, ranks
MESHES: dict[str, dict[str, Any]] = {  # on 4 ranks
    "FSDP2, 1-D": dict(dp=4, tp=1, hybrid=False),
    "FSDP2 + TP": dict(dp=2, tp=2, hybrid=False),
    "HSDP": dict(dp=4, tp=1, hybrid=True),
}
WIDTHS, SAVED, LAYERS = (128, 256, 512), (256, 1024), 4


def take(quick: bool) -> dict[str, Any]:
    """Return everything, as it is stored."""
    rounds = 3 if quick else 20
    found: dict[str, Any] = {"race": {}}
    for name, mesh in MESHES.items():
        print(f"Racing torch.optim.Muon on {name} ...", flush=True)
        grid = {key: mesh[key] for key in ("dp", "tp")}
        jobs = [(mesh["hybrid"], width, LAYERS, rounds) for width in WIDTHS[: 1 if quick else None]]
        found["race"][name] = [launch.run(RACE, job, **grid)[0] for job in jobs]
    print("Saving, and saving in the background ...", flush=True)
    found["save"] = [launch.run(SAVE, (width, LAYERS, rounds), dp=4)[0] for width in SAVED[: 1 if quick else None]]
    print("Watching ...", flush=True)
    watched = WATCHED[: 1 if quick else None]
    found["watch"] = [
        {"optimizer": name, "ranks": dp} | launch.run(WATCH, (name, rounds), dp=dp)[0] for name, dp in watched
    ]
    print("Logits, with and without the clip ...", flush=True)
    found["logits"] = logit_growth.table(logit_growth.study(seeds=logit_growth.SEEDS[: 1 if quick else None]))
    return found


def race_lines(found: dict[str, Any]) -> list[str]:
    """Return the race as a table, medians with quartiles."""
    widths = [race["width"] for race in next(iter(found["race"].values()))]
    table = [f"{'a step of MuonW / torch.optim.Muon':32s}" + "".join(f"{f'width {width:,}':>20s}" for width in widths)]
    for name, races in found["race"].items():
        table.append(f"  {name:30s}" + "".join(f"{_shown(race['ratio']):>20s}" for race in races))
    return table


def lines(found: dict[str, Any]) -> list[str]:
    """Return all results as tables, medians with quartiles."""
    table = race_lines(found)
    table.append("async_save / save: how long training waits")
    for row in found["save"]:
        size = f"{row['parameter_bytes_of_a_rank'] / 1e6:.0f} MB of parameters on a rank"
        table.append(f"  {size:30s}{_shown(row['blocked']):>20s}")
    table.append("a training step that Metrics observes / one that it does not; it observes one in 20")
    for row in found["watch"]:
        low, high = row["observed"]["quartiles"]
        ratio = {"median": 1 + row["observed"]["median"], "quartiles": [1 + low, 1 + high]}
        who = f"{row['optimizer']} on {row['ranks']} rank{'s' * (row['ranks'] > 1)}"
        table.append(f"  {who:30s}{_shown(ratio):>20s}")
    return table


def _shown(spread: dict[str, Any]) -> str:
    low, high = spread["quartiles"]
    return f"{spread['median']:.2f} ({low:.2f}–{high:.2f})"
