"""One training run, on a grid or in one process, that differs in nothing but where its pieces live.

The global batch is cut into the same micro-batches on every grid. DP rank r runs its share of them and accumulates;
one process runs them all. Both start from the same seeded whole weights and read the same rows.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.models.digits import Split, batch_rows
from distmuon.models.networks import ALONE, MLP, initial_weights
from distmuon.models.recipe import Recipe
from distmuon.optim import strategies
from distmuon.optim.overlap import OVERLAPS
from distmuon.optim.param_groups import groups_for, plan_groups
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.strategies.periodic import is_whole
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.buffers import dtype_name
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Layout
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import load_slices, whole_parameters
from distmuon.verify.prediction import predict_step

LOSS_BYTES = 8  # one float64


def network(recipe: Recipe, tp: Group = ALONE) -> MLP:
    """Return the model that a recipe trains, cut over `tp`, its weights not yet set.

    Smooth between its layers (GELU): at ReLU's kink a difference of 1e-7 turns a unit on for one digit, and a run in
    float32 is 1e-4 of the movement and more away from its reference, where the control, which met no kink, is 1e-6.
    """
    return MLP(recipe.widths, tp, activation=F.gelu).to(recipe.torch_dtype)


def initial_parameters(recipe: Recipe) -> dict[str, Tensor]:
    """Return the whole initial weights in the run's dtype: {name: tensor}."""
    return {name: w.to(recipe.torch_dtype) for name, w in initial_weights(network(recipe), recipe.seed).items()}


@dataclass
class Run:
    """What a run leaves. parameters: whole, after the last step. seconds_per_step: median, first step left out."""

    losses: list[float]
    parameters: dict[str, Tensor]
    seconds_per_step: float


def train(
    recipe: Recipe,
    data: Split,
    micro_batches: range,
    model: nn.Module,
    step: Callable[[], object],
    after_backward: Callable[[], object] = lambda: None,
    reduce_loss: Callable[[Tensor], Tensor] = lambda loss: loss,
    tick: Callable[[], object] = lambda: None,
) -> tuple[list[float], float]:
    """Run the loop that every start shares; return the losses and the median seconds per step.

    micro_batches: those that this process runs, in this order. after_backward: after each of them. reduce_loss: the
    mean over DP. tick: after each step, for a progress bar.
    """
    losses, seconds = [], []
    rows_each = recipe.batch // recipe.micro_batches
    for number in range(recipe.steps):
        rows = batch_rows(number, recipe.batch, len(data.labels), recipe.seed).to(data.labels.device)
        began = time.perf_counter()
        total = torch.zeros((), dtype=torch.float64, device=data.labels.device)
        for micro in micro_batches:
            mine = rows[micro * rows_each : (micro + 1) * rows_each]
            logits = model(data.images[mine].to(recipe.torch_dtype))
            loss = F.cross_entropy(logits, data.labels[mine]) / len(micro_batches)
            loss.backward()
            after_backward()
            total += loss.detach()
        step()
        losses.append(reduce_loss(total).item())
        seconds.append(time.perf_counter() - began)
        tick()
    return losses, statistics.median(seconds[1:] or seconds)


def build(
    recipe: Recipe, grid: Grid, muon: Callable[..., ShardedOptimizer] | None = None, **options: Any
) -> tuple[nn.Module, ShardedOptimizer]:
    """Return this rank's slice of the model, from the seeded whole weights, and its sharded optimizer.

    muon: another than that of the recipe's schedule, taking the same arguments, may be put under certificate.
    """
    model = network(recipe, grid.tp).to(grid.device)
    load_slices(model, {name: w.to(grid.device) for name, w in initial_parameters(recipe).items()}, grid.tp)
    options = {"bucket_size": recipe.bucket_size, "lr": recipe.lr, "weight_decay": recipe.weight_decay} | options
    groups = groups_for(model, recipe.optimizer)
    if recipe.optimizer == "adamw":
        return model, Zero1AdamW(groups, grid, **options)
    options |= {"gather_dtype": recipe.gather_dtype, "compute_dtype": recipe.compute_dtype}
    if recipe.strategy == "periodic":
        options["strategy_options"] = {"whole_every": recipe.whole_every}
    muon = OVERLAPS[recipe.overlap] if muon is None else muon
    return model, muon(groups, grid, strategy=recipe.strategy, publish=recipe.publish, **options)


Build = Callable[..., tuple[nn.Module, ShardedOptimizer]]  # (recipe, grid, **options), as `build`


def train_on_grid(
    recipe: Recipe, grid: Grid, data: Split, tick: Callable[[], object] = lambda: None, make: Build = build
) -> Run:
    """Train on this grid; all ranks call it together. Losses are means over the global batch, on every rank.

    make: `build`, or as `build`, with another optimizer in it.
    """
    model, optimizer = make(recipe, grid)
    each = recipe.micro_batches // grid.dp.size
    mine = range(grid.dp.rank * each, (grid.dp.rank + 1) * each)
    losses, seconds = train(
        recipe,
        data,
        mine,
        model,
        optimizer.step,
        reduce_loss=lambda loss: grid.dp.all_reduce(loss, "loss") / grid.dp.size,
        tick=tick,
    )
    return Run(losses, whole_parameters(model, replace(grid.tp, ledger=Ledger())), seconds)


def accuracy(recipe: Recipe, parameters: dict[str, Tensor], data: Split) -> float:
    """Return the share of `data` that the model with these whole parameters gets right, in one process."""
    model = network(recipe).to(data.images.device)
    model.load_state_dict(parameters)
    with torch.no_grad():
        found = model(data.images.to(recipe.torch_dtype)).argmax(dim=-1)
    return float((found == data.labels).double().mean())


def plan_run(recipe: Recipe, dp: int, tp: int) -> tuple[Layout, list[int], MLP]:
    """Return the map, the indices of its Muon parameters, and the TP-local model without storage; starts nothing."""
    with torch.device("meta"):
        model = network(recipe, Group("tp", tp))
    planner = strategies.planner(recipe.strategy) if recipe.optimizer == "muon" else None
    layout, muon = plan_groups(groups_for(model, recipe.optimizer), dp, recipe.bucket_size, tp, planner)
    return layout, muon, model


def predict_run(recipe: Recipe, dp: int, tp: int, rank: int) -> Ledger:
    """Return the ledger that `train_on_grid` will have filled on `rank` of the grid; starts nothing."""
    layout, muon, model = plan_run(recipe, dp, tp)
    where = divmod(rank, tp)
    run = Ledger()
    steps = Counter(is_whole(number, recipe.period) for number in range(recipe.steps))
    for whole, times in steps.items():  # those on whole matrices, and those on blocks
        step = predict_step(
            layout,
            tp,
            where[0],
            muon,
            recipe.strategy,
            dtype_name(recipe.gather_dtype),
            where[1],
            recipe.publish,
            None if whole else (),
        )
        for _ in range(recipe.micro_batches // dp):
            rows = recipe.batch // recipe.micro_batches
            model.predict_activations(step, rows, recipe.torch_dtype.itemsize, tp)
        step.record("all_reduce", "dp", dp, LOSS_BYTES, "loss")
        run.add(step, times)
    return run
