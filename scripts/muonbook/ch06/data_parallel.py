"""Data parallelism and its relatives on one model: what a rank keeps and sends, counted and predicted.

DDP and FSDP2 are torch's own, ZeRO-1 is ours. Kept are bytes of storages that really exist, found by walking
parameters, gradients and the optimizer's state; sent are those of the collectives that torch's dispatcher saw, by the
ring formula. Predictions come from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distmuon.models.networks import MLP
from distmuon.models.recipe import Recipe
from distmuon.optim.sharded_optimizer import Zero1AdamW
from distmuon.sharding.buffers import specs_of
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ITEM_BYTES, Layout, ParamSpec
from distmuon.sharding.ledger import ring_bytes
from distmuon.verify import model_states
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.prediction import predict_step
from distmuon.verify.training import build, initial_parameters, plan_run

KINDS = tuple(kind for kind in model_states.KINDS if kind != "momentum")  # nothing here is Muon


class Cost(NamedTuple):
    """What one rank keeps between steps, bytes per kind, and the bytes it sends in one step over the DP group."""

    kept: dict[str, int]
    sent: int


# ---- What is kept -----------------------------------------------------------------------------------------


def held(
    parameters: Iterable[Tensor], gradients: Iterable[Tensor], masters: Iterable[Tensor], state: Mapping[Any, Any]
) -> dict[str, int]:
    """Return bytes per kind, counted by `holdings.count`. state: an AdamW's, {parameter: its tensors}."""
    moments = model_states.by_kind(state.values())
    tensors = {"parameters": parameters, "gradients": gradients, "masters": masters} | moments
    return model_states.count({kind: tensors[kind] for kind in KINDS})


def held_by_zero1(optimizer: Zero1AdamW) -> dict[str, int]:
    """Count what a Zero1AdamW and its model keep; `.grad` too, should one be left."""
    buffers = optimizer.buffers
    assert optimizer.adamw is not None
    loose = [p.grad for p in buffers.parameters if p.grad is not None]
    return held(buffers.parameters, buffers.flat_gradients + loose, buffers.masters.values(), optimizer.adamw.state)


def predict_held(layout: Layout, dp_rank: int) -> dict[str, int]:
    """Return what `held_by_zero1` will count on a rank, from the map alone; in a map for D = 1 nothing is cut."""
    return _adamws(model_states.predict_shards(layout, dp_rank))


def _adamws(kept: Mapping[str, int]) -> dict[str, int]:
    return {kind: kept[kind] for kind in KINDS}


# ---- The ways: each returns (counted, predicted) ----------------------------------------------------------


def zero1(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """ZeRO-1 AdamW: gradients are reduced in float32, parameters gathered in the model's dtype."""
    model, optimizer = build(recipe, grid)
    sent = _take_steps(recipe, grid, model, optimizer.step, optimizer.zero_grad)
    layout, rank = plan_run(recipe, grid.dp.size, 1)[0], grid.dp.rank
    predicted = predict_step(layout, 1, rank).total(group="dp").sent_bytes
    return Cost(held_by_zero1(optimizer), sent), Cost(predict_held(layout, rank), predicted)


def plain(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """The same gradients and masters, and nothing cut: one all-reduce in float32, then the optimizer works alone."""
    model = _model(recipe, grid)
    optimizer = Zero1AdamW(model.named_parameters(), Grid.alone(str(grid.device)))

    def step() -> None:
        for flat in optimizer.buffers.flat_gradients:
            grid.dp.all_reduce(flat, "gradients").div_(grid.dp.size)
        optimizer.step()

    sent = _take_steps(recipe, grid, model, step, optimizer.zero_grad)
    layout = optimizer.buffers.layout
    predicted = sum(ring_bytes("all_reduce", b.size * ITEM_BYTES[b.grad_dtype], grid.dp.size) for b in layout.buffers)
    return Cost(held_by_zero1(optimizer), sent), Cost(predict_held(layout, 0), predicted)


def ddp(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """torch's DistributedDataParallel and AdamW: everything whole, and everything in the model's dtype."""
    model = _model(recipe, grid)
    specs = specs_of(list(model.named_parameters()))
    parallel = nn.parallel.DistributedDataParallel(
        model, process_group=grid.dp.process_group, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters())
    sent = _take_steps(recipe, grid, parallel, optimizer.step, optimizer.zero_grad)
    kept = _adamws(model_states.predict_whole(specs))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = Cost(held(model.parameters(), gradients, (), optimizer.state), sent)
    return found, Cost(kept, ring_bytes("all_reduce", kept["gradients"], grid.dp.size))


def fsdp2(recipe: Recipe, grid: Grid) -> tuple[Cost, Cost]:
    """torch's FSDP2, layer by layer: float32 shards that are cast to the model's dtype when they are gathered."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert grid.mesh is not None
    model = _model(recipe, grid).float()
    layers = [*model.layers, model.head]
    specs = [specs_of(list(layer.named_parameters())) for layer in layers]
    policy = MixedPrecisionPolicy(param_dtype=recipe.torch_dtype, reduce_dtype=torch.float32)
    for part in (*layers, model):
        fully_shard(part, mesh=grid.mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    sent = _take_steps(recipe, grid, model, optimizer.step, optimizer.zero_grad)
    weights = list(model.parameters())
    gradients = [p.grad for p in weights if p.grad is not None]
    wide = recipe.dtype == "float32"  # else the float32 shards are the masters of what is gathered
    kept = held(weights if wide else (), gradients, () if wide else weights, optimizer.state)
    return Cost(kept, sent), _predict_fsdp2(specs, recipe.torch_dtype.itemsize, wide, grid)


def _predict_fsdp2(layers: Sequence[Sequence[ParamSpec]], item: int, wide: bool, grid: Grid) -> Cost:
    """Rows are dealt out in equal runs, the last ones padded; a layer is gathered twice, its gradients reduced once."""
    size, kept, sent = grid.dp.size, dict.fromkeys(KINDS, 0), 0
    for specs in layers:
        shards = _adamws(model_states.predict_rows(specs, size, grid.dp.rank))
        kept = {kind: kept[kind] + shards[kind] for kind in KINDS}
        padded = shards["parameters"] // 4
        sent += 2 * ring_bytes("all_gather", size * padded * item, size)
        sent += ring_bytes("reduce_scatter", size * padded * 4, size)
    return Cost(kept if wide else kept | {"parameters": 0, "masters": kept["parameters"]}, sent)


WAYS: dict[tuple[str, str], Callable[[Recipe, Grid], tuple[Cost, Cost]]] = {
    ("float32", "DDP"): ddp,
    ("float32", "ZeRO-1"): zero1,
    ("float32", "FSDP2"): fsdp2,
    ("bfloat16", "DDP, no masters"): ddp,
    ("bfloat16", "plain, masters"): plain,
    ("bfloat16", "ZeRO-1"): zero1,
    ("bfloat16", "FSDP2"): fsdp2,
}


def compare(recipe: Recipe, grid: Grid) -> dict[tuple[str, str], tuple[Cost, Cost]]:
    """Train a little in each of the WAYS; return what this rank counted, and what was predicted. Collective."""
    return {key: way(replace(recipe, dtype=key[0], optimizer="adamw"), grid) for key, way in WAYS.items()}


def _model(recipe: Recipe, grid: Grid) -> MLP:
    model = MLP(recipe.widths).to(device=grid.device, dtype=recipe.torch_dtype)
    model.load_state_dict(initial_parameters(recipe))
    return model


def _take_steps(
    recipe: Recipe, grid: Grid, model: nn.Module, step: Callable[[], object], drop: Callable[[], object]
) -> int:
    """Take three steps on made-up data; return the bytes sent in the last, for DDP arranges itself in the first two."""
    for number in range(3):
        drop()
        x = torch.randn(8, recipe.widths[0], generator=torch.Generator().manual_seed(number))
        with CollectiveCounter() as counter:
            model(x.to(grid.device, recipe.torch_dtype)).square().mean().backward()
            step()
    return counter.ledger.total(group="dp").sent_bytes
