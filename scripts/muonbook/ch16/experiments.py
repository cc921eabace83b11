"""From the published layout to one owner per matrix, five layouts: what one step sends, computes and borrows, counted.

Bytes are the ledger's, operations those that torch's FlopCounterMode sees, memory what torch's dispatcher sees come to
life. All three are also predicted from the map alone, memory as a bound.
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
from muonbook.baselines import TITLES
from muonbook.measure.trainers import SAME_EVERYWHERE

SHAPE = dict(vocabulary=64, width=128, layers=4, heads=8, context=16)  # 16 square matrices, 8 four times as long


class MuonLayout(NamedTuple):
    """A layout of distributed Muon, by which it takes the step. publish: see `DistributedMuon`."""

    strategy: str
    bucket_size: int
    publish: str = "parameters"


LAYOUTS: Mapping[str, MuonLayout] = {
    TITLES["muon"]: MuonLayout("gather_all", 100_000),
    TITLES["muon_flat"]: MuonLayout("gather_all", FLAT),
    TITLES["muon_cut"]: MuonLayout("gather_cut", FLAT),
    TITLES["muon_owner"]: MuonLayout("owner", 100_000),
    f"{TITLES['muon_owner']}, sends updates": MuonLayout("owner", 100_000, "updates"),
}
ADAMW = TITLES["zero1"]


class Count(NamedTuple):
    """What one step took on one rank: bytes sent, operations in matrix products; at most how many bytes it borrowed.

    as_predicted: whether bytes, by bucket and collective, and operations are those of the map, and the peak of memory
    was within the bound.
    """

    sent: int
    flops: int
    bound: int
    as_predicted: bool


def take_steps(world: World) -> list[dict[str, Count]] | None:
    """Take the step by every layout, and with AdamW; return on rank 0 what it took, {layout: count} per rank."""
    grid = Grid.of(world)
    found = {}
    for name, step in {ADAMW: None, **LAYOUTS}.items():
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


def _optimizer(model: Transformer, grid: Grid, step: MuonLayout | None) -> ShardedOptimizer:
    if step is None:
        return Zero1AdamW(groups_for(model, "adamw"), grid)
    groups = groups_for(model, "muon")
    options: dict[str, Any] = {**step._asdict(), **SAME_EVERYWHERE}
    return DistributedMuon(groups, grid, **options)


def _give_gradients(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def _judged(optimizer: ShardedOptimizer, grid: Grid, step: MuonLayout | None, counted: int, peak: int) -> Count:
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
    return Count(int(grid.ledger.total().sent_bytes), counted, bound, agreed)


def once() -> float:
    """Return what Newton–Schulz on every matrix of the model, once, takes: FLOPs."""
    with torch.device("meta"):
        model = Transformer(**SHAPE)  # type: ignore[arg-type]
    muon = groups_for(model, "muon")[0]["params"]
    return float(sum(flops(tuple(parameter.shape)) for _, parameter in muon))


def report(ranks: Sequence[Mapping[str, Count]]) -> tuple[bool, None]:
    """Print the table; all is well if every rank sent and computed what the map said."""
    print("\n".join(lines(ranks)))
    return all_as_predicted(ranks), None


def lines(ranks: Sequence[Mapping[str, Count]]) -> list[str]:
    """Return the table: bytes over AdamW's, work over what each matrix once takes."""
    adamw, least = [rank[ADAMW] for rank in ranks], once()
    base = sum(count.sent for count in adamw)
    table = [f"{'':21s}{'bytes /':>9s}{'times':>10s}{'slowest':>9s}{'borrowed':>10s}"]
    table += [f"{'':21s}{'AdamW':>9s}{'computed':>10s}{'/ fair':>9s}{'at most':>10s}"]
    for name in ranks[0]:
        counts = [rank[name] for rank in ranks]
        work, slowest = sum(count.flops for count in counts), max(count.flops for count in counts)
        sent, bound = sum(count.sent for count in counts), max(count.bound for count in counts)
        times = f"{work / least:10.2f}{slowest * len(ranks) / least:9.2f}" if work else f"{'-':>10s}{'-':>9s}"
        ratio = f"{sent / base:9.3f}" if base else f"{'-':>9s}"  # one process sends nothing
        table.append(f"{name:21s}{ratio}{times}{bound / 1e6:7.2f} MB")
    return [*table, f"Bytes and operations are as predicted: {all_as_predicted(ranks)}."]


def all_as_predicted(ranks: Sequence[Mapping[str, Count]]) -> bool:
    """Say whether every rank sent and computed what the map said, by every layout."""
    return all(count.as_predicted for rank in ranks for count in rank.values())
