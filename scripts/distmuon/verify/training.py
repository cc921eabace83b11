"""The digits MLP of a `Recipe` as a problem for the certificate, and what its run will send and lay out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Layout
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import load_slices
from distmuon.verify.blueprint import Blueprint
from distmuon.verify.prediction import predict_step
from distmuon.verify.problem import Problem

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


Make = Callable[..., ShardedOptimizer]  # (groups, grid, **options), as DistributedMuon


def problem_of(recipe: Recipe, data: Split, tp: int = 1, muon: Make | None = None) -> Problem:
    """Return a recipe as what a certificate trains, held over T = `tp` against the optimizer that the recipe names.

    muon: another than that of the recipe's overlap, taking the same arguments, may be put under certificate.
    """

    def make_model(tp: Group = ALONE) -> MLP:
        model = network(recipe, tp).double()
        load_slices(model, initial_weights(network(recipe), recipe.seed), tp)
        return model

    def make_optimizer(model: nn.Module, grid: Grid, **options: Any) -> ShardedOptimizer:
        return optimizer_of(recipe, model, grid, muon, **options)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(data.images[rows].to(next(model.parameters()).dtype)), data.labels[rows])

    model = make_model()
    return Problem(
        make_model,
        [batch_rows(number, recipe.batch, len(data.labels), recipe.seed) for number in range(recipe.steps)],
        loss,
        make_optimizer,
        recipe.steps,
        recipe.micro_batches,
        recipe.torch_dtype,
        recipe.seed,
        Blueprint.of(optimizer_of(recipe, model, Grid.alone()), model, tp),
    )


def optimizer_of(
    recipe: Recipe, model: nn.Module, grid: Grid, muon: Make | None = None, **options: Any
) -> ShardedOptimizer:
    """Return the sharded optimizer of a recipe's model. muon: as for `problem_of`."""
    options = {"bucket_size": recipe.bucket_size, "lr": recipe.lr, "weight_decay": recipe.weight_decay} | options
    groups = groups_for(model, recipe.optimizer)
    if recipe.optimizer == "adamw":
        return Zero1AdamW(groups, grid, **options)
    if recipe.strategy == "periodic":
        options["strategy_options"] = {"whole_every": recipe.whole_every}
    muon = OVERLAPS[recipe.overlap] if muon is None else muon
    return muon(groups, grid, strategy=recipe.strategy, publish=recipe.publish, **options)


def accuracy(recipe: Recipe, parameters: dict[str, Tensor], data: Split) -> float:
    """Return the share of `data` that the model with these whole parameters gets right, in one process."""
    model = network(recipe).to(data.images.device)
    model.load_state_dict(parameters)
    with torch.no_grad():
        predicted = model(data.images.to(recipe.torch_dtype)).argmax(dim=-1)
    return float((predicted == data.labels).double().mean())


def plan_run(recipe: Recipe, dp: int, tp: int) -> tuple[Layout, list[int], MLP]:
    """Return the map, the indices of its Muon parameters, and the TP-local model without storage; starts nothing."""
    with torch.device("meta"):
        model = network(recipe, Group("tp", tp))
    planner = strategies.planner(recipe.strategy) if recipe.optimizer == "muon" else None
    layout, muon = plan_groups(groups_for(model, recipe.optimizer), dp, recipe.bucket_size, tp, planner)
    return layout, muon, model


def predict_run(recipe: Recipe, dp: int, tp: int, rank: int) -> Ledger:
    """Return the ledger that training will have filled on `rank` of the grid; starts nothing."""
    layout, muon, model = plan_run(recipe, dp, tp)
    dp_rank, tp_rank = divmod(rank, tp)
    at = (layout, tp, dp_rank, muon, recipe.strategy, recipe.gather_dtype, tp_rank, recipe.publish)
    run = Ledger()
    steps = Counter(is_whole(number, recipe.period) for number in range(recipe.steps))
    for whole, times in steps.items():  # those on whole matrices, and those on blocks
        step = predict_step(*at, whole=None if whole else ())
        for _ in range(recipe.micro_batches // dp):
            rows = recipe.batch // recipe.micro_batches
            model.predict_activations(step, rows, recipe.torch_dtype.itemsize, tp)
        step.record("all_reduce", "dp", dp, LOSS_BYTES, "loss")
        run.add(step, times)
    return run
