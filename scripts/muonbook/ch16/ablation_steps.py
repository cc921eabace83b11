"""From the blueprint to one owner per matrix, rung by rung: what one step sends, computes and holds, counted.

Bytes are the ledger's, operations those that torch's FlopCounterMode sees, memory what torch's dispatcher sees come to
life. All three are also predicted, from the map alone: the last as a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from distmuon.launch import World
from distmuon.models.networks import Transformer
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.newton_schulz import flops
from distmuon.optim.param_groups import groups_for
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import FLAT
from distmuon.verify.memory_tracker import StorageTracker
from distmuon.verify.prediction import predict_step, predict_transient, predict_work
from muonbook.measure.baselines import SAME_EVERYWHERE

SHAPE = dict(vocabulary=64, width=128, layers=4, heads=8, context=16)  # 16 square matrices, 8 four times as long


class AblationStep(NamedTuple):
    """One way to take the step. publish: see `DistributedMuon`."""

    strategy: str
    bucket_size: int
    publish: str = "parameters"


ABLATION_STEPS: Mapping[str, AblationStep] = {
    "1 gather_all, buckets": AblationStep("gather_all", 100_000),
    "2 gather_all, one bucket": AblationStep("gather_all", FLAT),
    "3 gather_cut, one bucket": AblationStep("gather_cut", FLAT),
    "4 owner, buckets": AblationStep("owner", 100_000),
    "5 owner, publishes updates": AblationStep("owner", 100_000, "updates"),
}
ADAMW = "0 AdamW, ZeRO-1"


class Count(NamedTuple):
    """What one step took on one rank: bytes sent, operations in matrix products; at most how many bytes it borrowed.

    state: elements of the optimizer's state that this rank keeps.

    as_predicted: whether bytes, by bucket and collective, and operations are those of the map, and the peak of memory
    was within the bound.
    """

    sent: int
    flops: int
    bound: int
    state: int
    as_predicted: bool


def take_steps(world: World) -> list[dict[str, Count]] | None:
    """Take the step on every rung, and with AdamW; return on rank 0 what it took on every rank, {rung: count} each."""
    grid = Grid.of(world)
    found = {}
    for name, step in {ADAMW: None, **ABLATION_STEPS}.items():
        torch.manual_seed(0)  # all start alike, whoever started them
        model = Transformer(**SHAPE, tp=grid.tp)  # type: ignore[arg-type]
        optimizer = _optimizer(model.to(grid.device), grid, step)
        _give_gradients(model)
        optimizer.step()  # makes the state, which stays
        _give_gradients(model)
        grid.ledger.clear()
        with FlopCounterMode(display=False) as counted, StorageTracker() as tracker:
            optimizer.step()
        found[name] = _judged(optimizer, grid, step, counted.get_total_flops(), tracker.peak)
    return world.gather(found)


def _optimizer(model: Transformer, grid: Grid, step: AblationStep | None) -> ShardedOptimizer:
    if step is None:
        return Zero1AdamW(groups_for(model, "adamw"), grid)
    groups = groups_for(model, "muon")
    options: dict[str, Any] = {**step._asdict(), **SAME_EVERYWHERE}
    return DistributedMuon(groups, grid, **options)


def _give_gradients(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def _judged(optimizer: ShardedOptimizer, grid: Grid, step: AblationStep | None, counted: int, peak: int) -> Count:
    """Hold what a step took against what the map said of it."""
    layout, tp, place = optimizer.buffers.layout, grid.tp.size, (grid.dp.rank, grid.tp.rank)
    if step is not None and isinstance(optimizer, DistributedMuon):
        muon, strategy = list(optimizer.muon), step.strategy
        ledger = predict_step(layout, tp, place[0], muon, strategy, tp_rank=place[1], publish=step.publish)
        bound = predict_transient(layout, tp, place[0], muon, strategy, compute_dtype="float32", publish=step.publish)
        work = predict_work(strategy, layout, tp, muon)[place]
    else:
        ledger, work = predict_step(layout, tp, place[0]), 0
        bound = predict_transient(layout, tp, place[0])
    agreed = grid.ledger == ledger and counted == work and peak <= bound
    state = sum(value.numel() for kept in optimizer.state.values() for value in kept.values())
    return Count(int(grid.ledger.total().sent_bytes), counted, bound, state, agreed)


def once() -> float:
    """Return what Newton–Schulz on every matrix of the model, once, takes: FLOPs."""
    with torch.device("meta"):
        model = Transformer(**SHAPE)  # type: ignore[arg-type]
    muon = groups_for(model, "muon")[0]["params"]
    return float(sum(flops(tuple(parameter.shape)) for _, parameter in muon))


def report(ranks: Sequence[Mapping[str, Count]]) -> tuple[bool, None]:
    """Print the ladder; all is well if every rank sent and computed what the map said."""
    print("\n".join(lines(ranks)))
    return all_as_predicted(ranks), None


def lines(ranks: Sequence[Mapping[str, Count]]) -> list[str]:
    """Return the ladder as a table: bytes over AdamW's, work over what each matrix once takes."""
    adamw, least = [rank[ADAMW] for rank in ranks], once()
    base = sum(count.sent for count in adamw)
    table = [f"{'':27s}bytes sent  Newton–Schulz   slowest /   borrowed,     state,"]
    table += [f"{'':27s} / AdamW's  of each matrix      fair     at most  max / mean"]
    for name in ranks[0]:
        counts = [rank[name] for rank in ranks]
        work, slowest = sum(count.flops for count in counts), max(count.flops for count in counts)
        sent, bound = sum(count.sent for count in counts), max(count.bound for count in counts)
        times = f"{work / least:9.2f} times{slowest * len(ranks) / least:10.2f} x" if work else f"{'-':>15s}{'-':>12s}"
        ratio = f"{sent / base:8.3f} x" if base else f"{'-':>10s}"  # one process sends nothing
        states = [count.state for count in counts]
        uneven = max(states) * len(states) / sum(states)
        table.append(f"{name:27s}{ratio}{times}{bound / 1e6:9.2f} MB{uneven:10.2f} x")
    return [*table, f"On every rank, bytes and operations are those predicted: {all_as_predicted(ranks)}."]


def all_as_predicted(ranks: Sequence[Mapping[str, Count]]) -> bool:
    """Say whether on every rung every rank sent and computed what the map said."""
    return all(count.as_predicted for rank in ranks for count in rank.values())
