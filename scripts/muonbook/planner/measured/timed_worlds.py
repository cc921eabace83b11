"""What ranks do for `worlds`: they plan a large world on the clock, or baselines take training steps in turn; and what
a plan says of each step before: operations, elements, messages and bytes.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distmuon.launch import World
from distmuon.optim import strategies
from distmuon.optim.param_groups import groups_for
from distmuon.sharding.buffers import specs_of
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.counter import CollectiveCounter
from muonbook.measure import interleaved_timing
from muonbook.measure.trainers import Trainer, make_fsdp2, make_strategy, make_zero1, predict_activations
from muonbook.measure.workload import Workload, batches, pixels
from muonbook.planner.cost_model import demand
from muonbook.planner.model_shapes import MODELS
from muonbook.planner.owned_worlds import plan_part
from muonbook.planner.parts.every_rank import Zero1Part
from muonbook.planner.parts.fsdp_worlds import Dtypes, FsdpPart
from muonbook.planner.stages import Degrees, units_of
from muonbook.planner.world_plan import WorldPlan, WorldSetting

FLOAT32 = Dtypes("float32", "float32", "float32")
LARGEST = WorldSetting(MODELS["kimi_k2"], Degrees(128, 8, 8, 64))  # a trillion parameters on 8,192 ranks


def plan_the_largest(world: World) -> dict[str, float]:
    """Return what planning `LARGEST` takes: seconds, and the most memory that this process ever held, in bytes."""
    began = time.monotonic()
    WorldPlan(LARGEST).as_dict()
    unit = 1 if sys.platform == "darwin" else 1024
    return {"seconds": time.monotonic() - began, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def time_steps(world: World, workload: Workload, baselines: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Let the baselines take training steps in turn for `rounds` rounds, after one that makes state and buckets.

    Return per baseline this rank's "seconds", its "sent_bytes" as torch's dispatcher counted them, the
    "predicted_bytes", and what the plan says it is "asked".
    """
    grid = Grid.of(world)
    batch = next(batches(workload, pixels(grid, workload.context), world.dp, grid.dp.rank))
    found = timed({name: make(name, workload, grid) for name in baselines}, batch, rounds)
    for name in baselines:
        part, ledger = planned(name, workload, grid)
        found[name]["predicted_bytes"] = ledger.total().sent_bytes
        found[name]["asked"] = asked(part, ledger, workload, grid)
    return found


def timed(trainers: Mapping[str, Trainer], batch: tuple[Tensor, Tensor], rounds: int) -> dict[str, dict[str, Any]]:
    """Let trainers take steps in turn for `rounds` rounds, after one of each that makes state and buckets.

    Return per trainer this rank's "seconds" of every step, and its "sent_bytes" in one, as torch's dispatcher counted
    them. Collective.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, trainer in trainers.items():
        with CollectiveCounter() as counter:
            trainer.step(batch)
        found[name] = {"sent_bytes": counter.ledger.total().sent_bytes}
    acts = {name: partial(trainer.step, batch) for name, trainer in trainers.items()}
    seconds = interleaved_timing.take_turns(acts, rounds, warm_up=0, before=lambda _: dist.barrier())
    return {name: found[name] | {"seconds": seconds[name]} for name in trainers}


def make(name: str, workload: Workload, grid: Grid) -> Trainer:
    """Return a baseline at work: "adamw", "muonw", or a strategy's name."""
    if name == "muonw":
        return make_fsdp2(workload, grid, muonw=True)
    if name == "adamw":
        return make_zero1(workload, grid)
    return make_strategy(workload, grid, name, workload.bucket_size)


def planned(name: str, workload: Workload, grid: Grid) -> tuple[Zero1Part | FsdpPart, Ledger]:
    """Return the planner's part for a baseline, and what this rank will send in a step."""
    dp, tp = grid.dp.size, grid.tp.size
    _, muon, model = workload.plan(dp, tp)
    ledger = predict_activations(model, workload, dp, tp)
    specs = specs_of([pair for group in groups_for(model, "muon") for pair in group["params"]])
    if name == "muonw":
        units = units_of(specs)
        part = FsdpPart(specs, frozenset(muon), dp, tp, units, dtypes=FLOAT32)
        for op, (_, payload, sent) in zip(("all_gather", "reduce_scatter"), part.gathers().values(), strict=True):
            ledger.record(op, "dp", 2, payload, "FSDP2", sent_bytes=sent)
        for label, amounts in zip(("momentum", "updates"), part.exchanged(), strict=True):
            if amounts.any():
                ledger.record("all_to_all", "mesh", 2, 0, label, sent_bytes=int(amounts[grid.world.rank]))
        return part, ledger
    strategy = "gather_all" if name == "adamw" else name
    world = plan_part(specs, muon, dp, tp, workload.bucket_size, strategy)
    ledger.add(world.ledger(grid.dp.rank, name != "adamw", grid.tp.rank))
    return Zero1Part(world, name != "adamw"), ledger


def asked(part: Zero1Part | FsdpPart, ledger: Ledger, workload: Workload, grid: Grid) -> dict[str, float]:
    """Return what one step asks of a rank, from the plan.

    passes, orthogonalizing: FLOPs of forward and backward, and of Newton–Schulz, the second the mean over ranks.
    elements: that are reduced or updated. parameters: of the model. matrices: that the rank orthogonalizes, on average.
    units: gathers and reductions that FSDP2 makes. ranks: of the world. Beside them its `demand`.
    """
    ranks = grid.world.size
    if isinstance(part, FsdpPart):
        specs, matrices, units = part.specs, len(part.muon), sum(calls for calls, *_ in part.gathers().values())
    else:
        world, tasks = part.world, strategies.costs_of(part.world.strategy).tasks
        assert tasks is not None
        every = tasks(world.layout, world.muon, world.tp) if part.muon else ()
        specs, matrices, units = world.layout.specs, sum(len(task.ranks) for task in every), 0
    tables = ("tokens.weight", "positions.weight")
    multiplied = sum(spec.numel for spec in specs if len(spec.shape) == 2 and spec.name not in tables)
    sizes = {"dp": grid.dp.size, "tp": grid.tp.size, "world": ranks, "mesh": ranks}
    return {
        "passes": 6.0 * multiplied * workload.tokens / grid.dp.size,
        "orthogonalizing": float(part.flops().mean()),
        "elements": sum(spec.numel for spec in specs),
        "parameters": len(specs),
        "matrices": matrices / ranks,
        "units": units,
        **demand(ledger, sizes),
        "ranks": ranks,
    }
