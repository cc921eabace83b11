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

from distmuon.counter import CollectiveCounter
from distmuon.grid import Grid
from distmuon.layout import ITEM_BYTES, Layout, ParamSpec
from distmuon.ledger import ring_bytes
from distmuon.models import MLP
from distmuon.prediction import predict_step
from distmuon.recipe import Recipe
from distmuon.training import build, initial_parameters, plan_run
from distmuon.zero1 import specs_of
from distmuon.zero1_optimizer import Zero1AdamW

KINDS = ("parameters", "gradients", "masters", "exp_avg", "exp_avg_sq", "counters")  # counters: AdamW's steps, 4 B each


class Cost(NamedTuple):
    """What one rank keeps between steps, bytes per kind, and the bytes it sends in one step over the DP group."""

    kept: dict[str, int]
    sent: int


# ---- What is kept -----------------------------------------------------------------------------------------


def held(
    parameters: Iterable[Tensor], gradients: Iterable[Tensor], masters: Iterable[Tensor], state: Mapping[Any, Any]
) -> dict[str, int]:
    """Return bytes per kind of the storages behind these tensors, each counted once, where it is first met.

    Of a DTensor this rank's part counts. state: an AdamW's, {parameter: {"exp_avg", "exp_avg_sq", "step"}}.
    """
    states = [tensors for tensors in state.values() if tensors]
    moments = [[tensors[name] for tensors in states] for name in ("exp_avg", "exp_avg_sq", "step")]
    kept, seen = dict.fromkeys(KINDS, 0), set()
    for kind, tensors in zip(KINDS, (parameters, gradients, masters, *moments), strict=True):
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            kept[kind] += storage.nbytes() if storage._cdata not in seen else 0
            seen.add(storage._cdata)
    return kept


def held_by_zero1(optimizer: Zero1AdamW) -> dict[str, int]:
    """Count what a Zero1AdamW and its model keep; `.grad` too, should one be left."""
    buffers = optimizer.buffers
    assert optimizer.adamw is not None
    loose = [p.grad for p in buffers.parameters if p.grad is not None]
    return held(buffers.parameters, buffers.flat_gradients + loose, buffers.masters.values(), optimizer.adamw.state)


def predict_held(layout: Layout, dp_rank: int) -> dict[str, int]:
    """Return what `held_by_zero1` will count on a rank, from the map alone; in a map for D = 1 nothing is cut."""
    kept, metas = dict.fromkeys(KINDS, 0), layout.view(dp_rank)
    for bucket in layout.buckets:
        buffer = layout.buffers[bucket.buffer_idx]
        kept["parameters"] += bucket.padded * ITEM_BYTES[buffer.param_dtype]
        kept["gradients"] += bucket.padded * ITEM_BYTES[buffer.grad_dtype]
        if buffer.grad_dtype != buffer.param_dtype:  # else the parameters are their own masters
            kept["masters"] += bucket.shard_size * ITEM_BYTES[buffer.grad_dtype]
        for index in bucket.params:
            kept["exp_avg"] += metas[index].local_range.size * ITEM_BYTES[buffer.grad_dtype]
            kept["counters"] += 4 * metas[index].owned
    return kept | {"exp_avg_sq": kept["exp_avg"]}


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
    specs, item = specs_of(list(model.named_parameters())), recipe.torch_dtype.itemsize
    parallel = nn.parallel.DistributedDataParallel(
        model, process_group=grid.dp.process_group, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters())
    sent = _take_steps(recipe, grid, parallel, optimizer.step, optimizer.zero_grad)
    size = item * sum(spec.numel for spec in specs)
    kept = dict.fromkeys(KINDS, size) | {"masters": 0, "counters": 4 * len(specs)}
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = Cost(held(model.parameters(), gradients, (), optimizer.state), sent)
    return found, Cost(kept, ring_bytes("all_reduce", size, grid.dp.size))


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
    size, rank = grid.dp.size, grid.dp.rank
    kept, sent = dict.fromkeys(KINDS, 0), 0
    for specs in layers:
        padded = 0
        for spec in specs:
            rows, columns = -(-spec.shape[0] // size), spec.numel // spec.shape[0]
            padded += rows * columns
            kept["exp_avg"] += 4 * min(rows, max(0, spec.shape[0] - rows * rank)) * columns
            kept["counters"] += 4
        kept["parameters" if wide else "masters"] += 4 * padded
        kept["gradients"] += 4 * padded
        sent += 2 * ring_bytes("all_gather", size * padded * item, size)
        sent += ring_bytes("reduce_scatter", size * padded * 4, size)
    return Cost(kept | {"exp_avg_sq": kept["exp_avg"]}, sent)


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
