"""What Metrics costs: a training step of a small transformer, unobserved, beside one that nobody watches, and observed.

An observation happens in one step out of `every`, so its cost is spread over them. Shares of a training step, forward
and backward pass included. What it cannot show: a GPU's cost, and that of matrices wider than these, whose samples'
eigendecompositions grow with the third power of the shorter side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from distmuon.extras.metrics.observer import Metrics
from distmuon.launch import World
from distmuon.models.networks import Transformer
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.muonw import MuonW
from distmuon.optim.param_groups import split_parameters
from distmuon.sharding.grid import Grid
from muon_conformance.placements import fsdp
from muonbook.measure import interleaved_timing, results

NEVER = 1 << 60  # steps between observations
CALLS = 1000  # of the hooks alone


def cost(
    world: World,
    optimizer: str = "MuonW",
    rounds: int = 8,
    width: int = 512,
    layers: int = 4,
    tokens: tuple[int, int] = (8, 128),  # of each rank: sequences, length
    samples: int = 1,
    every: int = 20,
) -> dict[str, Any]:
    """Return what watching adds to a step, as a share of an unwatched one's time.

    observed: in a step that is observed, its spread over rounds. between: in one that is not, by the clock around the
    hooks alone: microseconds, which whole steps would hide in their noise.
    overhead: on average, where one step in `every` is observed; from medians.
    On several ranks MuonW's model is cut by FSDP2, and DistributedMuon's grid is all DP.
    """
    step, chosen = _training(world, optimizer, width, layers, tokens)
    watching: list[Metrics] = []

    def before(name: str) -> None:
        for metrics in watching:
            metrics.close()
        watching[:] = [Metrics(chosen, 1, samples=samples)] if name == "observed" else []
        if world.size > 1:
            dist.barrier()

    seconds = interleaved_timing.take_turns(dict.fromkeys(("unwatched", "observed"), step), rounds, before=before)
    observed = results.spread(
        [ratio - 1 for ratio in interleaved_timing.ratios(seconds["observed"], seconds["unwatched"])]
    )
    medians = interleaved_timing.medians(seconds)
    between = _seconds_between(chosen) / medians["unwatched"]
    overhead = (between * (every - 1) + observed["median"]) / every
    return {"observed": observed, "between": between, "overhead": overhead, "every": every, "seconds": medians}


def _seconds_between(optimizer: torch.optim.Optimizer) -> float:
    """Return what the hooks take around a step that is not observed."""
    with Metrics(optimizer, NEVER) as metrics:

        def hooks() -> None:
            for _ in range(CALLS):
                metrics.before_step()
                metrics.after_step()

        return interleaved_timing.clocked(hooks) / CALLS


def _training(
    world: World, optimizer: str, width: int, layers: int, tokens: tuple[int, int]
) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """Return a training step, and its optimizer."""
    torch.manual_seed(0)
    model: Any = Transformer(256, width, layers, 8, tokens[1])
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
