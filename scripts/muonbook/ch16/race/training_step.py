"""A whole training step of Muon with one owner per matrix, over ZeRO-1 AdamW's: bytes and time over batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.overlap import PipelinedMuon
from distmuon.optim.param_groups import groups_for
from distmuon.sharding.grid import Grid
from distmuon.verify.counter import CollectiveCounter
from muonbook.ch16.race.four_ranks import forbid_matrix_unit
from muonbook.measure import interleaved_timing, results
from muonbook.measure.baselines import Trainer, make_muon, make_zero1, sliced_model
from muonbook.measure.workload import TIMED, Workload, batches, pixels


def make_owner(
    workload: Workload, grid: Grid, optimizer: type[DistributedMuon] = DistributedMuon, **options: Any
) -> Trainer:
    """Return the trainer that differs from the baseline "muon" in its strategy alone, its schedule, these options."""
    model = sliced_model(workload, grid)
    options |= workload.hyperparameters | {"bucket_size": workload.bucket_size}
    return Trainer(model, [optimizer(groups_for(model, "muon"), grid, strategy="owner", **options)])


MAKE: dict[str, Callable[[Workload, Grid], Trainer]] = {
    "zero1": make_zero1,
    "gather_all": make_muon,
    "owner": make_owner,
    "owner_pipelined": partial(make_owner, optimizer=PipelinedMuon),
    "owner_updates": partial(make_owner, publish="updates"),
}


def compare(
    world: World, sequences: Sequence[int], rounds: int, workload: Workload = TIMED, matrix_unit: bool = True
) -> list[dict[str, Any]] | None:
    """Let all train in turns, with so many sequences per DP rank; on rank 0, return a row for each number of them.

    matrix_unit: False forbids oneDNN to use the CPU's.
    """
    if not matrix_unit:
        forbid_matrix_unit()
    grid, found = Grid.of(world), []
    corpus = pixels(grid, workload.context)
    trainers = {name: make(workload, grid) for name, make in MAKE.items()}
    for each in sequences:
        sized = workload.shared_by(world.dp, each)
        batch = next(batches(sized, corpus, world.dp, grid.dp.rank))
        sent = {}
        for name, trainer in trainers.items():
            with CollectiveCounter() as counter:
                trainer.step(batch)
            sent[name] = counter.ledger.total().sent_bytes
        acts = {name: partial(trainer.step, batch) for name, trainer in trainers.items()}
        seconds = interleaved_timing.take_turns(acts, rounds, before=lambda _: dist.barrier())
        everywhere = world.gather((sent, seconds))
        if everywhere is not None:
            found.append({"tokens": sized.tokens} | _over_zero1(everywhere))
    return found if world.rank == 0 else None


def _over_zero1(ranks: Sequence[tuple[dict[str, int], dict[str, list[float]]]]) -> dict[str, Any]:
    """Return per trainer but ZeRO-1: bytes of all ranks, and the spread of the slowest rank's time, over ZeRO-1's."""
    sent = {name: sum(bytes_[name] for bytes_, _ in ranks) for name in MAKE}
    slowest = {name: [max(times) for times in zip(*(s[name] for _, s in ranks), strict=True)] for name in MAKE}
    return {
        name: {
            "bytes_ratio": sent[name] / sent["zero1"],
            "ratio": results.spread(interleaved_timing.ratios(slowest[name], slowest["zero1"])),
        }
        for name in MAKE
        if name != "zero1"
    }
