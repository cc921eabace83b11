"""What chapter 17 measures by the clock, `make bench NAMES=muonw`: the step beside torch's, saving, watching, logits.

A step that `Metrics` observes is a share of a training step, forward and backward pass included. What it cannot show:
a GPU's cost, and that of matrices wider than these, whose samples' eigendecompositions grow with the third power of the
shorter side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from distmuon import checkpoint, launch
from distmuon.extras.metrics.observer import Metrics
from distmuon.launch import World
from distmuon.models.networks import Transformer
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muonw import MuonW
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.grid import Grid
from muon_conformance.placements import fsdp
from muonbook.ch17 import logit_growth
from muonbook.ch17.four_steps import TORCH, give_gradients, make, matrices_of, on_mesh
from muonbook.measure import interleaved_timing, results

HERE = "muonbook.ch17.costs"
WATCHED = (("MuonW", 1), ("MuonW", 2), ("DistributedMuon", 2))  # optimizer, ranks
MESHES: dict[str, dict[str, Any]] = {  # on 4 ranks
    "FSDP2, 1-D": dict(dp=4, tp=1, hybrid=False),
    "FSDP2 + TP": dict(dp=2, tp=2, hybrid=False),
    "HSDP": dict(dp=4, tp=1, hybrid=True),
}
WIDTHS, SAVED, LAYERS = (128, 256, 512), (256, 1024), 4


def measure(quick: bool) -> dict[str, Any]:
    """Return everything, as it is stored."""
    rounds = 3 if quick else 20
    found: dict[str, Any] = {"race": {}}
    for name, mesh in MESHES.items():
        print(f"Racing torch.optim.Muon on {name} ...", flush=True)
        grid = {key: mesh[key] for key in ("dp", "tp")}
        jobs = [(mesh["hybrid"], width, rounds) for width in WIDTHS[: 1 if quick else None]]
        found["race"][name] = [launch.run(f"{HERE}:race", job, **grid)[0] for job in jobs]
    print("Saving, and saving in the background ...", flush=True)
    saved = SAVED[: 1 if quick else None]
    found["save"] = [launch.run(f"{HERE}:save", (width, rounds), dp=4)[0] for width in saved]
    print("Watching ...", flush=True)
    watched = WATCHED[: 1 if quick else None]
    found["watch"] = [
        {"optimizer": name, "ranks": dp} | launch.run(f"{HERE}:watch", (name, rounds), dp=dp)[0] for name, dp in watched
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


def _shown(spread: dict[str, Any]) -> str:
    low, high = spread["quartiles"]
    return f"{spread['median']:.2f} ({low:.2f}–{high:.2f})"


# ---- The race ---------------------------------------------------------------------------------------------

OURS = "MuonW"


def race(world: World, hybrid: bool, width: int, rounds: int) -> dict[str, Any]:
    """Return the spread, over rounds, of our time for a step over torch's on the same DTensors. Collective."""
    torch.set_num_threads(1)
    steps = {}
    for name in (OURS, TORCH):
        model, dp = on_mesh(world, hybrid, width, LAYERS)
        parameters = matrices_of(model)
        give_gradients(parameters)
        optimizer = MuonW(parameters, lr=0.02) if name == OURS else make(name, parameters, dp)
        steps[name] = interleaved_timing.ended(optimizer.step, world.device)

    def to_the_last(name: str) -> None:
        steps[name]()
        dist.barrier()

    acts = {name: (lambda name=name: to_the_last(name)) for name in steps}
    seconds = interleaved_timing.take_turns(acts, rounds, before=lambda _: dist.barrier())
    ratio = interleaved_timing.ratios(seconds[OURS], seconds[TORCH])
    return {"width": width, "matrices": len(parameters), "ratio": results.spread(ratio)}


# ---- Saving -----------------------------------------------------------------------------------------------


def save(world: World, width: int, rounds: int) -> dict[str, Any]:
    """Return the spread, over rounds, of the time that `async_save` blocks over that of `save`. Collective."""
    torch.set_num_threads(1)
    model, _ = on_mesh(world, False, width, LAYERS)
    optimizer = MuonW(model)
    give_gradients(list(model.parameters()))
    optimizer.step()
    saved, running = 0, Future[None]()
    running.set_result(None)
    place = [tempfile.TemporaryDirectory() if world.rank == 0 else None]
    where = [None if place[0] is None else place[0].name]
    dist.broadcast_object_list(where, src=0)

    def folder() -> Path:
        nonlocal saved
        saved += 1
        return Path(str(where[0]), f"step-{saved}")

    def in_background() -> None:
        nonlocal running
        running = checkpoint.async_save(folder(), model, optimizer)

    def before(_: str) -> None:
        running.result()
        dist.barrier()

    acts = {"save": lambda: checkpoint.save(folder(), model, optimizer), "async_save": in_background}
    seconds = interleaved_timing.take_turns(acts, rounds, before=before)
    before("")
    if place[0] is not None:
        place[0].cleanup()
    bytes_here = sum(t.numel() * t.element_size() for t in model.parameters()) // world.size
    share = interleaved_timing.ratios(seconds["async_save"], seconds["save"])
    return {"width": width, "parameter_bytes_of_a_rank": bytes_here, "blocked": results.spread(share)}


# ---- Watching ---------------------------------------------------------------------------------------------


def watch(world: World, optimizer: str, rounds: int) -> dict[str, Any]:
    """Return what an observation adds to a training step: its spread, over rounds, as a share of an unwatched step.

    On several ranks MuonW's model is cut by FSDP2, and DistributedMuon's grid is all DP.
    """
    step, chosen = _training(world, optimizer)
    watching: list[Metrics] = []

    def before(name: str) -> None:
        for metrics in watching:
            metrics.close()
        watching[:] = [Metrics(chosen, 1)] if name == "observed" else []
        if world.size > 1:
            dist.barrier()

    seconds = interleaved_timing.take_turns(dict.fromkeys(("unwatched", "observed"), step), rounds, before=before)
    ratios = interleaved_timing.ratios(seconds["observed"], seconds["unwatched"])
    return {"observed": results.spread([ratio - 1 for ratio in ratios])}


def _training(world: World, optimizer: str) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """Return a training step of a small transformer, and its optimizer."""
    torch.manual_seed(0)
    tokens = (8, 128)  # of each rank: sequences, length
    model: Any = Transformer(256, 512, LAYERS, 8, tokens[1])
    chosen: torch.optim.Optimizer
    if optimizer == "MuonW":
        if world.size > 1:
            fsdp(world, model)
        chosen = MuonW(split_parameters(model), lr=1e-3)
    else:
        chosen = DistributedMuon(split_parameters(model), Grid.of(world), lr=1e-3, strategy="owner")
    ids = torch.randint(256, tokens, generator=torch.Generator().manual_seed(world.rank))

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        chosen.step()
        chosen.zero_grad()

    return step, chosen
