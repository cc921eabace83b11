"""What chapter 15 measures: the optimizer's share over the batch, skewed grids, and links of several speeds.

Contenders step in every round, in random order, so that each sees the same machine; kept are ratios of such rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distmuon import launch
from distmuon.launch import hosts
from muonbook.measure import results
from muonbook.measure.workload import TIMED, Workload, batches, pixels

if TYPE_CHECKING:
    from muonbook.measure.baselines import Trainer

MICRO_BATCH = 512  # tokens of one forward and backward pass; larger batches accumulate
WIDTHS = (64, 256)  # of the models whose batch grows
MOST_TOKENS = 32_768
GRIDS = ((8, 1), (4, 2), (2, 4), (1, 8))  # dp, tp
RATES = (30.0, 100.0, 300.0, 1000.0, None)  # Mbit/s; None: unlimited
RANKS = 4  # of the worlds with links
LINKED = Workload(width=128, layers=2, sequences=RANKS)  # small enough for the slowest link


@dataclass(frozen=True)
class Entrant:
    """One of those that take turns. contender: its name in CONTENDERS. bucket_size: elements, for ours."""

    contender: str
    bucket_size: int = TIMED.bucket_size


SKEW = {"muon": Entrant("muon"), "zero1": Entrant("zero1"), "ddp": Entrant("ddp")}
LINKS = SKEW | {"zero1_small": Entrant("zero1", 1 << 15), "muon_small": Entrant("muon", 1 << 15)}


# ---- Batch size -------------------------------------------------------------------------------------------


def token_counts(most: int) -> list[int]:
    """Return 64, 128, 256, ... up to `most`: tokens per step."""
    return [64 << n for n in range(most.bit_length()) if 64 << n <= most]


def measure_share(rounds: int, most_tokens: int = MOST_TOKENS) -> dict[str, Any]:
    """Return per width of a model what `optimizer_share` says: one rank, one thread, as ranks have elsewhere."""
    return {str(width): launch.run(optimizer_share, (width, most_tokens, rounds))[0] for width in WIDTHS}


def optimizer_share(world: launch.World, width: int, most_tokens: int, rounds: int) -> dict[str, Any]:
    """Time Muon's and AdamW's step over forward and backward of the same model, on one rank, per batch size.

    Return {"tokens": [...], "muon": [spread, ...], "adamw": [spread, ...]}; a share is of the time of forward and
    backward, of all micro-batches of a step. Batches beyond 4,096 tokens get three rounds at most. The two optimizers
    step in random order.
    """
    from distmuon.sharding.grid import Grid
    from muonbook.measure.baselines import CONTENDERS

    workload, grid = replace(TIMED, width=width), Grid.of(world)
    corpus = pixels(grid, workload.context)
    whole = {"muon": "muon_ddp", "adamw": "ddp"}  # on one rank, DDP is left out
    trainers = {name: CONTENDERS[contender].make(workload, grid, None) for name, contender in whole.items()}
    found: dict[str, Any] = {"tokens": token_counts(most_tokens), "muon": [], "adamw": []}
    for tokens in found["tokens"]:
        micro = replace(workload, sequences=min(tokens, MICRO_BATCH) // workload.context)
        data = batches(micro, corpus, 1, 0)
        shares: dict[str, list[float]] = {name: [] for name in trainers}
        warming = tokens == found["tokens"][0]  # a round more, which is forgotten
        for turn in range(warming + (rounds if tokens <= 4096 else min(rounds, 3))):
            compute = trainers["muon"].forward_backward
            backward = sum(_seconds(compute, *next(data)) for _ in range(tokens // micro.tokens))
            trainers["adamw"].forward_backward(*next(data))
            for name in results.shuffled(trainers, turn):
                shares[name].append(_seconds(trainers[name].update) / backward)
        for name, values in shares.items():
            found[name].append(spread(values[warming:]))
    return found


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return `results.spread`, and beside it the range: of few values, quartiles say little."""
    return results.spread(values) | {"range": [min(values), max(values)]}


def _seconds(act: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    act(*arguments)
    return time.perf_counter() - began


# ---- Steps of several contenders, in turn -----------------------------------------------------------------


def time_steps(
    world: launch.World, workload: Workload, entrants: Mapping[str, Entrant], rounds: int, muted: bool
) -> dict[str, dict[str, Any]]:
    """Run on every rank: let the entrants step in random order for `rounds` rounds, after one that warms up.

    Return per entrant this rank's "seconds" of every step, its "sent_bytes" per step as torch's dispatcher counted
    them, and the "predicted_bytes". muted: time each also with its collectives muted, as "muted_seconds".
    """
    import torch.distributed as dist

    from distmuon.sharding.grid import Grid
    from distmuon.verify.counter import CollectiveCounter
    from muonbook.measure.baselines import CONTENDERS, ONE_BUCKET

    grid = Grid.of(world)
    corpus, trainers = pixels(grid, workload.context), {}
    found: dict[str, dict[str, Any]] = {}
    for name, entrant in entrants.items():
        contender, its = CONTENDERS[entrant.contender], replace(workload, bucket_size=entrant.bucket_size)
        trainers[name] = contender.make(its, grid, ONE_BUCKET)
        if muted:
            from muonbook.ch15.without_communication import muted_trainer

            trainers[f"muted {name}"] = muted_trainer(entrant.contender, its, grid)
        assert contender.predict is not None
        predicted = contender.predict(its, world.dp, world.tp, grid.dp.rank).total().sent_bytes
        found[name] = {"seconds": [], "muted_seconds": [], "predicted_bytes": predicted}
    data = batches(workload, corpus, world.dp, grid.dp.rank)
    for turn in range(1 + rounds):
        batch = next(data)
        for label in results.shuffled(trainers, turn):
            name, counter = label.removeprefix("muted "), CollectiveCounter()
            if turn == 0:  # makes state and buckets
                with counter:
                    _take_step(trainers[label], batch)
                found[name].setdefault("sent_bytes", counter.ledger.total().sent_bytes)
                continue
            dist.barrier()
            seconds = _seconds(_take_step, trainers[label], batch)
            found[name]["seconds" if label == name else "muted_seconds"].append(seconds)
    return found


def _take_step(trainer: Trainer, batch: tuple[Any, Any]) -> None:
    trainer.forward_backward(*batch)
    trainer.update()


def slowest(ranks: Sequence[dict[str, dict[str, Any]]], name: str, key: str = "seconds") -> list[float]:
    """Return, per round, the time of the rank that took longest: ranks start together, and all must end."""
    return [max(times) for times in zip(*(rank[name][key] for rank in ranks), strict=True)]


def ratios(ranks: Sequence[dict[str, dict[str, Any]]], name: str, to: str) -> dict[str, Any]:
    """Return the spread of step time over that of the entrant `to` in the same round."""
    pairs = zip(slowest(ranks, name), slowest(ranks, to), strict=True)
    return spread([mine / theirs for mine, theirs in pairs])


# ---- Skewed grids, and links ------------------------------------------------------------------------------


def measure_skew(rounds: int, grids: Sequence[tuple[int, int]] = GRIDS) -> list[dict[str, Any]]:
    """Return per grid (dp, tp): mean bytes per rank, and step time over ZeRO-1 AdamW's, of each entrant; rounds 0: no
    times."""
    rows = []
    for dp, tp in grids:
        ranks = launch.run(time_steps, (TIMED, SKEW, rounds, False), dp=dp, tp=tp)
        row: dict[str, Any] = {"dp": dp, "tp": tp, "tokens": TIMED.tokens}
        for name in SKEW:
            row[name] = _bytes(ranks, name)
            if rounds:
                row[name]["seconds"] = spread(slowest(ranks, name))
                row[name]["over_zero1"] = ratios(ranks, name, "zero1")
        rows.append(row)
    return rows


def _bytes(ranks: Sequence[dict[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    mine = [rank[name] for rank in ranks]
    return {
        "sent_bytes": sum(rank["sent_bytes"] for rank in mine) / len(ranks),
        "predicted_bytes": sum(rank["predicted_bytes"] for rank in mine) / len(ranks),
        "equal_on_every_rank": all(rank["sent_bytes"] == rank["predicted_bytes"] for rank in mine),
    }


def measure_links(rounds: int, rates: Sequence[float | None] = RATES) -> dict[str, Any]:
    """Return per rate the step times of each entrant, and what each computes when its collectives are muted.

    Needs `hosts.become_switch`. Messages and bytes of a step, which the model is fed, come from the predictions.
    """
    steps: list[dict[str, Any]] = []
    muted: dict[str, list[float]] = {name: [] for name in LINKS}
    for rate in rates:
        turns = rounds if rate is not None and rate < 200 else 2 * rounds  # where steps are short, more of them
        ranks = launch.run(time_steps, (LINKED, LINKS, turns, True), dp=RANKS, link=hosts.Link(rate))
        steps.append({"rate_mbit": rate})
        for name in LINKS:
            seconds = spread(slowest(ranks, name))
            steps[-1][name] = {"seconds": seconds, "over_zero1": ratios(ranks, name, "zero1")}
            muted[name] += slowest(ranks, name, "muted_seconds")
    entrants = {name: demand(entrant) | {"computation_seconds": spread(muted[name])} for name, entrant in LINKS.items()}
    return {"ranks": RANKS, "tokens": LINKED.tokens, "entrants": entrants, "steps": steps}


def demand(entrant: Entrant) -> dict[str, int]:
    """Return what a step of LINKED asks of the wire, per rank: messages one after the other, and bytes by pattern.

    "exchange_bytes" are those of reduce-scatters, which on gloo are all-to-alls; "ring_bytes" all others.
    """
    from muonbook.ch15.cost_model import collectives_of, hops
    from muonbook.measure.baselines import CONTENDERS

    predict = CONTENDERS[entrant.contender].predict
    assert predict is not None
    ledger = predict(replace(LINKED, bucket_size=entrant.bucket_size), RANKS, 1, 0)
    rows = collectives_of(ledger, {"dp": RANKS, "world": RANKS})
    exchanged = ledger.total(op="reduce_scatter").sent_bytes
    return {
        "messages": sum(row.calls * hops(row.op, row.group_size) for row in rows),
        "ring_bytes": ledger.total().sent_bytes - exchanged,
        "exchange_bytes": exchanged,
    }
