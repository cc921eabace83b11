"""Gradients that travel under the backward pass, and parameters that arrive under the next forward pass: what that
changes, and what it gains.

Timed are whole training steps, several in a row, because what one of them has started arrives in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distmuon.launch import World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.param_groups import groups_for
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from muonbook.ch14.schedule_race import alike
from muonbook.ch14.single_thread_gloo import one_at_a_time
from muonbook.measure import interleaved_timing, results
from muonbook.measure.baselines import SAME_EVERYWHERE, Trainer, sliced_model
from muonbook.measure.workload import Workload, batches, pixels

STEPS = 3  # in a turn of the race, and in a comparison
OPTIMIZERS: dict[str, Callable[..., ShardedOptimizer]] = {
    "adamw": Zero1AdamW,
    "muon": partial(DistributedMuon, strategy="owner"),
}
HIDDEN = {"nothing": (False, False), "gradients": (True, False), "both": (True, True)}  # under backward, under forward


class HidingTrainer(Trainer):
    """A trainer that sends gradients while the backward pass goes on."""

    @property
    def optimizer(self) -> ShardedOptimizer:
        (found,) = self.optimizers
        assert isinstance(found, ShardedOptimizer)
        return found

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.optimizer.overlap_backward():
            return super().forward_backward(inputs, targets)


def make(workload: Workload, grid: Grid, name: str, hidden: str, **options: Any) -> Trainer:
    """Return one of OPTIMIZERS at work, hiding what HIDDEN says."""
    backward, forward = HIDDEN[hidden]
    model = sliced_model(workload, grid)
    options |= workload.hyperparameters | {"bucket_size": workload.bucket_size, "overlap_forward": forward}
    optimizer = OPTIMIZERS[name](groups_for(model, name), grid, **options)
    return (HidingTrainer if backward else Trainer)(model, [optimizer])


def compare(world: World, workload: Workload) -> list[dict[str, Any]] | None:
    """Train Muon with nothing and with both hidden; on rank 0, return per rank what was under way when, and whether
    parameters and bytes are the same."""
    grid = Grid.of(world)
    batch = next(batches(workload, pixels(grid, workload.context), world.dp, grid.dp.rank))
    plain, hiding = (make(workload, grid, "muon", hidden, **SAME_EVERYWHERE) for hidden in ("nothing", "both"))
    assert isinstance(hiding, HidingTrainer)
    embedding: Any = hiding.model.tokens  # the first layer: its gradients come last
    sent, arriving = list[int](), list[int]()
    embedding.weight.register_post_accumulate_grad_hook(
        lambda _: sent.append(len(hiding.optimizer.buckets) - len(hiding.optimizer.waiting_buckets))
    )
    ledgers = []
    for trainer in (plain, hiding):
        grid.ledger.clear()
        for _ in range(STEPS):
            trainer.step(batch)
            if trainer is hiding:
                arriving.append(len(hiding.optimizer.arriving_buckets))
        ledgers.append({row: total for row, total in grid.ledger if row.label != "order of the buckets"})
    return world.gather(
        {
            "buckets": len(hiding.optimizer.buckets),
            "sent": sent,
            "arriving": arriving,
            "equal": alike(plain.model, hiding.model),
            "same bytes": ledgers[0] == ledgers[1],
        }
    )


def race(world: World, workload: Workload, rounds: int) -> dict[str, Any] | None:
    """Let all take turns, one collective at a time; on rank 0, return per optimizer and what it hides: the ratio to the
    same with nothing hidden, and to AdamW that hides as much."""
    with one_at_a_time():
        grid = Grid.of(world)
    batch = next(batches(workload, pixels(grid, workload.context), world.dp, grid.dp.rank))
    trainers = {f"{name}, {hidden}": make(workload, grid, name, hidden) for name in OPTIMIZERS for hidden in HIDDEN}

    def turn(trainer: Trainer) -> None:
        for _ in range(STEPS):
            trainer.step(batch)
        for optimizer in trainer.optimizers:
            assert isinstance(optimizer, ShardedOptimizer)
            optimizer.wait_for_parameters()
        dist.barrier()

    acts = {key: partial(turn, trainer) for key, trainer in trainers.items()}
    seconds = interleaved_timing.take_turns(acts, rounds, before=lambda _: dist.barrier())
    pairs = [(f"{name}, nothing", f"{name}, {hidden}") for name in OPTIMIZERS for hidden in HIDDEN]
    equal = all(alike(trainers[one].model, trainers[other].model) for one, other in pairs)
    everywhere = world.gather((equal, seconds))
    if everywhere is None:
        return None
    slowest = {key: [max(times) for times in zip(*(s[key] for _, s in everywhere), strict=True)] for key in trainers}

    def ratios(name: str, to: Mapping[str, str]) -> dict[str, Any]:
        pairs = {hidden: (slowest[f"{name}, {hidden}"], slowest[to[hidden]]) for hidden in HIDDEN}
        return {hidden: results.spread(interleaved_timing.ratios(*pair)) for hidden, pair in pairs.items()}

    return {
        "equal_parameters": all(equal for equal, _ in everywhere),
        "ratio_to_nothing_hidden": {
            name: ratios(name, dict.fromkeys(HIDDEN, f"{name}, nothing")) for name in OPTIMIZERS
        },
        "muon_over_adamw": ratios("muon", {hidden: f"adamw, {hidden}" for hidden in HIDDEN}),
    }
