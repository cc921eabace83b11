"""What the ranks of chapter 15's worlds do: AdamW on DDP and ZeRO-1, and Muon by layout, take steps on the clock.

Each of them also does without communication: every collective returns at once, with this rank's own bytes in the
others' places. What is left is the computation of a rank, copies included, while the other ranks compute on the same
cores. Its numbers mean nothing, and stay finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distmuon.launch import World
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from muonbook.measure import interleaved_timing
from muonbook.measure.trainers import Trainer
from muonbook.measure.workload import TIMED, Workload, batches, pixels
from muonbook.planner.cost_model import demand
from muonbook.planner.measured.timed_worlds import timed
from muonbook.runnable_baselines import RUNNABLE

Batches = Iterator[tuple[Tensor, Tensor]]
MICRO_BATCH = 512  # tokens of one forward and backward pass; larger batches accumulate


def optimizer_share(world: World, width: int, token_counts: Sequence[int], rounds: int) -> dict[str, list[list[float]]]:
    """Time Muon's and AdamW's step over forward and backward of the same model, on one rank, per batch size.

    Return {"muon": [shares by round, ...], "adamw": ...}, one list per batch; a share is of the time of forward and
    backward, of all micro-batches of a step. Batches beyond 4,096 tokens get three rounds at most.
    """
    workload, grid = replace(TIMED, width=width), Grid.of(world)
    corpus = pixels(grid, workload.context)
    whole = {"muon": "muon_ddp", "adamw": "ddp"}  # on one rank, DDP is left out
    trainers = {name: RUNNABLE[baseline].make(workload, grid) for name, baseline in whole.items()}
    found: dict[str, list[list[float]]] = {name: [] for name in trainers}
    for tokens in token_counts:
        micro = replace(workload, sequences=min(tokens, MICRO_BATCH) // workload.context)
        most, warm_up = rounds if tokens <= 4096 else min(rounds, 3), int(tokens == token_counts[0])
        shares = _shares(trainers, batches(micro, corpus, 1, 0), tokens // micro.tokens, most, warm_up)
        for name, values in shares.items():
            found[name].append(values)
    return found


def _shares(
    trainers: Mapping[str, Trainer], data: Batches, passes: int, rounds: int, warm_up: int
) -> dict[str, list[float]]:
    """Return the seconds of updates over those of `passes` times forward and backward of one model, by round."""
    backward: list[float] = []

    def make_gradients(name: str) -> None:
        many = passes if name == "muon" else 1  # both have the same model, so one of them is timed
        took = [interleaved_timing.clocked(partial(trainers[name].forward_backward, *next(data))) for _ in range(many)]
        if name == "muon":
            backward.append(sum(took))

    updates = {name: trainer.update for name, trainer in trainers.items()}
    seconds = interleaved_timing.take_turns(updates, rounds, warm_up, make_gradients)
    return {name: interleaved_timing.ratios(taken, backward[warm_up:]) for name, taken in seconds.items()}


def time_steps(
    world: World,
    workload: Workload,
    baselines: Mapping[str, tuple[str, int]],
    rounds: int,
    bare: bool,
    grids: Sequence[tuple[int, int]] | None = None,
) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """Let the baselines take training steps in turn for `rounds` rounds, on one grid of these ranks after the other.

    baselines: name -> (name in `RUNNABLE`, bucket size in elements, for ours that are not flat). grids: (dp, tp); None:
    the world's own.
    Return per grid and baseline what `timed` does, the "predicted_bytes", and its `demand`. bare: time each without
    communication, too, as "computation_seconds".
    """
    own = ((world.dp, world.tp),)
    return {
        (dp, tp): _on_grid(replace(world, dp=dp, tp=tp), workload, baselines, rounds, bare) for dp, tp in grids or own
    }


def _on_grid(
    world: World, workload: Workload, baselines: Mapping[str, tuple[str, int]], rounds: int, bare: bool
) -> dict[str, dict[str, Any]]:
    grid = Grid.of(world)
    sizes = {"dp": world.dp, "tp": world.tp, "world": world.size}
    trainers: dict[str, Trainer] = {}
    asked: dict[str, dict[str, Any]] = {}
    for name, (of, bucket_size) in baselines.items():
        baseline, its = RUNNABLE[of], replace(workload, bucket_size=bucket_size)
        trainers[name] = baseline.make(its, grid)
        if bare:
            trainers[f"{name}, bare"] = trainer_without_communication(of, its, grid)
        ledger = baseline.predict(its, world.dp, world.tp, (grid.dp.rank, grid.tp.rank))
        asked[name] = {"predicted_bytes": ledger.total().sent_bytes, "demand": demand(ledger, sizes)}
    batch = next(batches(workload, pixels(grid, workload.context), world.dp, grid.dp.rank))
    found = timed(trainers, batch, rounds)
    for name in baselines if bare else ():
        asked[name]["computation_seconds"] = found[f"{name}, bare"]["seconds"]
    return {name: asked[name] | found[name] for name in baselines}


# ---- Without communication ----


@dataclass
class GroupWithoutCommunication(Group):
    """A group of `size` ranks that receive nothing from each other.

    Shapes and sums are those of Group; nothing is sent.
    """

    def all_gather(
        self,
        shard: Tensor,
        label: str,
        out: Tensor | None = None,
    ) -> Tensor:
        out = shard.new_empty(self.size * shard.numel()) if out is None else out
        for part in out.chunk(self.size):
            part.copy_(shard)
        return out

    def all_reduce(self, tensor: Tensor, label: str, op: Any = None) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, label: str) -> Tensor:
        return tensor

    def _exchange(
        self, parcels: Tensor, coming: Sequence[int] | None = None, going: Sequence[int] | None = None
    ) -> Tensor:
        if coming is None:
            return parcels
        received = parcels.new_zeros(sum(coming))
        fitting = min(len(received), len(parcels))
        received[:fitting].copy_(parcels[:fitting])
        return received

    def _record(self, op: str, payload: Tensor, label: str, sent: int | None = None) -> None:
        pass


def trainer_without_communication(name: str, workload: Workload, grid: Grid) -> Trainer:
    """Return the baseline `name` on a grid of the same shape that is silent over DP; T must be 1.

    What torch's DDP adds to a step is its all-reduce: without communication, it is the bare model.
    """
    assert grid.tp.size == 1, "only DP falls silent"
    silent = GroupWithoutCommunication("dp", grid.dp.size, grid.dp.rank)
    timed = RUNNABLE[name]
    dp = Group("dp") if timed.ddp_alone else silent
    world = GroupWithoutCommunication("world", grid.world.size, grid.world.rank)
    return timed.make(workload, Grid(dp, grid.tp, world, torch.device(grid.device), dp.ledger))
