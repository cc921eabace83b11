"""What the ranks of chapter 15's worlds do: variants of the baselines take steps in turn, on the clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distmuon.launch import World
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.counter import CollectiveCounter
from muonbook.ch15.contenders import trainer_without_communication
from muonbook.contenders import CONTENDERS
from muonbook.measure import interleaved_timing
from muonbook.measure.baselines import Trainer
from muonbook.measure.workload import TIMED, Workload, batches, pixels
from muonbook.planner.cost_model import collectives_of, exchanged_bytes, hops

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
    trainers = {name: CONTENDERS[baseline].make(workload, grid) for name, baseline in whole.items()}
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
    world: World, workload: Workload, variants: Mapping[str, tuple[str, int]], rounds: int, bare: bool
) -> dict[str, dict[str, Any]]:
    """Let the variants take training steps in turn for `rounds` rounds, after one of each that makes state and buckets.

    variants: name -> (contender, bucket size in elements, for ours that are not flat).
    Return per variant this rank's "seconds" of every step, its "sent_bytes" per step as torch's dispatcher counted
    them, the "predicted_bytes", and its `demand`. bare: time each also without communication, as "computation_seconds".
    """
    grid = Grid.of(world)
    corpus, sizes = pixels(grid, workload.context), {"dp": world.dp, "tp": world.tp, "world": world.size}
    trainers: dict[tuple[str, str], Trainer] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, (of, bucket_size) in variants.items():
        timed, its = CONTENDERS[of], replace(workload, bucket_size=bucket_size)
        trainers[name, "seconds"] = timed.make(its, grid)
        if bare:
            trainers[name, "computation_seconds"] = trainer_without_communication(of, its, grid)
        ledger = timed.predict(its, world.dp, world.tp, (grid.dp.rank, grid.tp.rank))
        found[name] = {"predicted_bytes": ledger.total().sent_bytes, "demand": demand(ledger, sizes)}
    data = batches(workload, corpus, world.dp, grid.dp.rank)
    batch = next(data)
    for (name, key), trainer in trainers.items():
        with CollectiveCounter() as counter:
            trainer.step(batch)
        if key == "seconds":
            found[name]["sent_bytes"] = counter.ledger.total().sent_bytes
    acts = {" ".join(label): partial(trainer.step, batch) for label, trainer in trainers.items()}
    seconds = interleaved_timing.take_turns(acts, rounds, warm_up=0, before=lambda _: dist.barrier())
    for name, key in trainers:
        found[name][key] = seconds[f"{name} {key}"]
    return found


def demand(ledger: Ledger, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return what a predicted step asks of the link, per rank: messages one after the other, and bytes by pattern.

    sizes: ranks of "dp", "tp" and "world". "exchange_bytes" go straight to others, "ring_bytes" around a ring.
    """
    exchanged = exchanged_bytes(ledger)
    return {
        "messages": sum(row.calls * hops(row.op, row.group_size) for row in collectives_of(ledger, sizes)),
        "ring_bytes": ledger.total().sent_bytes - exchanged,
        "exchange_bytes": exchanged,
    }
