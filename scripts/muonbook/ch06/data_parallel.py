"""Variants of data parallelism on one model: what a rank keeps and sends, counted and predicted.

DDP and FSDP2 are torch's own, ZeRO-1 is ours. Kept are bytes of storages that really exist, found by walking
parameters, gradients and the optimizer's state; sent are those of the collectives that torch's dispatcher saw, by the
ring formula. Predictions come from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from distmuon.launch import World
from distmuon.models.networks import MLP
from distmuon.models.recipe import Recipe
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ITEM_BYTES
from distmuon.sharding.ledger import ring_bytes
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.model_states import ModelStates, count, predict_replicas, predict_rows, predict_shards
from distmuon.verify.prediction import predict_step
from distmuon.verify.training import initial_parameters, network, optimizer_of, plan_run
from muonbook.measure.baselines import Trainer, data_parallel, shard_by_rows


class Cost(NamedTuple):
    """What one rank keeps between steps, bytes per kind, and the bytes it sends in one step over the DP group."""

    states: ModelStates
    sent: int


# ---- The variants: each returns (counted, predicted) ------------------------------------------------------


def zero1(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """ZeRO-1 AdamW: gradients are reduced in float32, parameters gathered in the model's dtype."""
    model = _model(recipe, grid)
    optimizer = optimizer_of(recipe, model, grid)
    layout, rank = plan_run(recipe, grid.dp.size, 1)[0], grid.dp.rank
    sent = predict_step(layout, 1, rank).total(group="dp").sent_bytes
    return _count(Trainer(model, [optimizer]), recipe, grid), Cost(predict_shards(layout, rank), sent)


def plain(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """The same gradients and masters, and nothing cut: one all-reduce in float32, then the optimizer works alone."""
    model = _model(recipe, grid)
    optimizer = Zero1AdamW(model.named_parameters(), Grid.alone(str(grid.device)))

    def average() -> None:
        for flat in optimizer.buffers.flat_gradients:
            grid.dp.all_reduce(flat, "gradients").div_(grid.dp.size)

    layout = optimizer.buffers.layout  # a map for D = 1
    sent = sum(ring_bytes("all_reduce", b.size * ITEM_BYTES[b.grad_dtype], grid.dp.size) for b in layout.buffers)
    return _count(Trainer(model, [optimizer]), recipe, grid, average), Cost(predict_shards(layout, 0), sent)


def ddp(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """torch's DistributedDataParallel and AdamW: everything whole, and everything in the model's dtype."""
    model = _model(recipe, grid)
    trainer = Trainer(data_parallel(model, grid), [torch.optim.AdamW(model.parameters())])
    states = predict_replicas(plan_run(recipe, grid.dp.size, 1)[0])
    return _count(trainer, recipe, grid), Cost(states, ring_bytes("all_reduce", states["gradients"], grid.dp.size))


def fsdp2(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """torch's FSDP2, layer by layer: float32 shards that are cast to the model's dtype when they are gathered.

    A layer is gathered twice, its gradients are reduced once.
    """
    model, size, item = _model(recipe, grid).float(), grid.dp.size, recipe.torch_dtype.itemsize
    policy = MixedPrecisionPolicy(param_dtype=recipe.torch_dtype, reduce_dtype=torch.float32)
    shard_by_rows([*model.layers, model.head, model], grid, mp_policy=policy)
    counted = _count(Trainer(model, [torch.optim.AdamW(model.parameters())]), recipe, grid)
    states = predict_rows(plan_run(replace(recipe, dtype="float32"), size, 1)[0], grid.dp.rank)
    padded = size * states["parameters"] // 4  # elements
    sent = 2 * ring_bytes("all_gather", padded * item, size) + ring_bytes("reduce_scatter", padded * 4, size)
    costs = counted, Cost(states, sent)
    if recipe.dtype != "float32":  # the float32 shards are the masters of what is gathered
        for cost in costs:
            cost.states.update(parameters=0, masters=cost.states["parameters"])
    return costs


VARIANTS: dict[tuple[str, str], Callable[[Recipe, Grid], tuple[Cost, Cost]]] = {
    ("float32", "DDP"): ddp,
    ("float32", "ZeRO-1"): zero1,
    ("float32", "FSDP2"): fsdp2,
    ("bfloat16", "DDP, no masters"): ddp,
    ("bfloat16", "plain, masters"): plain,
    ("bfloat16", "ZeRO-1"): zero1,
    ("bfloat16", "FSDP2"): fsdp2,
}


def compare(world: World, recipe: Recipe) -> list[dict[tuple[str, str], tuple[Cost, Cost]]] | None:
    """Train a little in each variant; return, on rank 0, what every rank counted, and what was predicted."""
    grid = Grid.of(world)
    return world.gather({
        (dtype, name): variant(replace(recipe, dtype=dtype), grid) for (dtype, name), variant in VARIANTS.items()
    })  # fmt: skip


def report(ranks: list[dict[tuple[str, str], tuple[Cost, Cost]]], recipe: Recipe) -> tuple[bool, list[dict[str, Any]]]:
    """Print bytes per parameter of every variant; return whether all that was counted was predicted, and rank 0's."""
    parameters = sum(spec.numel for spec in plan_run(recipe, 1, 1)[0].specs)
    rows: list[dict[str, Any]] = []
    for (dtype, variant), (counted, _) in ranks[0].items():
        kept = {k: size / parameters for k, size in counted.states.items() if k not in ("momentum", "counters")}
        rows.append({"dtype": dtype, "way": variant, "kept": kept, "sent": counted.sent / parameters})
    print(f"Bytes per parameter on rank 0 of {len(ranks)}")
    print(f"{'':<26}params   grads masters   m, v    kept    sent")
    for row in rows:
        weights, gradients, masters, *moments = row["kept"].values()
        columns = (weights, gradients, masters, sum(moments), sum(row["kept"].values()), row["sent"])
        print(f"{row['dtype']:<9} {row['way']:<15}" + "".join(f"{value:>7.2f} " for value in columns).rstrip())
    right = all(counted == predicted for rank in ranks for counted, predicted in rank.values())
    print(f"Every rank, way and kind, counted = predicted to the byte: {right}.")
    return right, rows


def _model(recipe: Recipe, grid: Grid) -> MLP:
    model = network(recipe).to(grid.device)
    model.load_state_dict(initial_parameters(recipe))
    return model


def _count(trainer: Trainer, recipe: Recipe, grid: Grid, before_update: Callable[[], object] = lambda: None) -> Cost:
    """Take three steps on made-up data; return the cost of the last, for DDP arranges itself in the first two."""
    states: ModelStates = {}

    def look() -> None:
        before_update()
        states.update(count(trainer.tensors()))

    labels = torch.zeros(8, dtype=torch.int64, device=grid.device)
    for number in range(3):
        x = torch.randn(len(labels), recipe.widths[0], generator=torch.Generator().manual_seed(number))
        with CollectiveCounter() as counter:
            trainer.step((x.to(grid.device, recipe.torch_dtype), labels), look)
    return Cost(states, counter.ledger.total(group="dp").sent_bytes)
