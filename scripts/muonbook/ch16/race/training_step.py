"""A whole training step of Muon with one owner per matrix, over ZeRO-1 AdamW's: its time over batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.param_groups import groups_for
from distmuon.sharding.grid import Grid
from muonbook.measure import interleaved_timing, results
from muonbook.measure.baselines import Trainer, make_muon, make_zero1, sliced_model
from muonbook.measure.workload import TIMED, Workload, batches, pixels


def make_owner(workload: Workload, grid: Grid, publish: str = "parameters") -> Trainer:
    """Return the trainer that differs from the baseline "muon" in its strategy alone, and in what is sent back."""
    model = sliced_model(workload, grid)
    options = workload.hyperparameters | {"bucket_size": workload.bucket_size}
    optimizer = DistributedMuon(groups_for(model, "muon"), grid, strategy="owner", publish=publish, **options)
    return Trainer(model, [optimizer])


MAKE: dict[str, Callable[[Workload, Grid], Trainer]] = {
    "zero1": make_zero1,
    "gather_all": make_muon,
    "owner": make_owner,
    "owner_updates": partial(make_owner, publish="updates"),
}


def compare(
    world: World, sequences: Sequence[int], rounds: int, workload: Workload = TIMED
) -> list[dict[str, Any]] | None:
    """Let all train in turns, with so many sequences per DP rank; on rank 0, return a row for each number of them: the
    spread of the slowest rank's time over ZeRO-1's."""
    grid, found = Grid.of(world), []
    corpus = pixels(grid, workload.context)
    trainers = {name: make(workload, grid) for name, make in MAKE.items()}
    for each in sequences:
        sized = workload.shared_by(world.dp, each)
        batch = next(batches(sized, corpus, world.dp, grid.dp.rank))
        acts = {name: partial(trainer.step, batch) for name, trainer in trainers.items()}
        everywhere = world.gather(interleaved_timing.take_turns(acts, rounds, before=lambda _: dist.barrier()))
        if everywhere is None:
            continue
        slowest = {
            name: [max(times) for times in zip(*(rank[name] for rank in everywhere), strict=True)] for name in MAKE
        }
        ratios = {name: interleaved_timing.ratios(slowest[name], slowest["zero1"]) for name in MAKE if name != "zero1"}
        found.append(
            {"tokens": sized.tokens} | {name: {"ratio": results.spread(each)} for name, each in ratios.items()}
        )
    return found if world.rank == 0 else None
