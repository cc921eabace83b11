"""What every rank runs for test_certificate.py and test_prediction.py: one world per grid does everything."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import optimizer_cases
import torch
from torch import Tensor, nn

from distmuon import launch
from distmuon.launch import World
from distmuon.models.digits import digits
from distmuon.models.networks import MLP, Transformer
from distmuon.models.recipe import Recipe
from distmuon.optim import strategies
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.param_groups import plan_groups, split_parameters
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import FLAT, Layout
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import mark
from distmuon.verify.certificate import Evidence, exact_on_grid, replicas_agree
from distmuon.verify.counter import CollectiveCounter
from distmuon.verify.prediction import predict_step
from distmuon.verify.problem import Problem, train_on_grid
from distmuon.verify.training import problem_of

GRIDS = [(1, 1), (4, 1), (2, 2), (4, 2), (1, 8)]  # these differ in kind: every strategy, and every counted step
OTHER_GRIDS = [(2, 1), (1, 2), (2, 4), (8, 1)]
LARGE_GRID = (8, 4)

RECIPES = {
    f"{optimizer} {dtype}": Recipe(steps=5, optimizer=optimizer, dtype=dtype)
    for optimizer in ("muon", "adamw")
    for dtype in ("float32", "bfloat16")
}
TINY = {
    f"tiny {dtype}": Recipe((64, 32, 16, 16, 10), steps=2, batch=32, dtype=dtype, bucket_size=1000)
    for dtype in ("float32", "bfloat16")
}


BEYOND = {  # the blueprint
    f"{strategy} {dtype}": replace(TINY[f"tiny {dtype}"], strategy=strategy)
    for strategy in ("gather_cut", "owner")
    for dtype in ("float32", "bfloat16")
}


OTHERS = {  # optimizers where T is more than 1: not Muon
    "blockwise float32": replace(TINY["tiny float32"], strategy="blockwise"),
    **{
        f"periodic {dtype}": replace(TINY[f"tiny {dtype}"], strategy="periodic", whole_every=2, steps=3)
        for dtype in ("float32", "bfloat16")
    },
    "periodic every step": replace(TINY["tiny float32"], strategy="periodic", whole_every=1),  # is Muon again
}

EVERY = RECIPES | TINY | BEYOND | OTHERS


class Witness(NamedTuple):
    """What one rank hands over.

    evidence: per recipe; empty on other ranks than 0. trained: the ledger of that recipe's training.
    cases: per name in CASES, of one step: our ledger, the dispatcher's count, and the prediction made in this process.
    """

    evidence: dict[str, Evidence]
    trained: dict[str, Ledger]
    cases: dict[str, tuple[Ledger, Ledger, Ledger]]


def run_cases(world: World, recipes: Mapping[str, Recipe], cases: bool = True) -> Witness:
    """Train every recipe and make every counted step. Recipes that differ only in dtype share what is not theirs."""
    grid = Grid.of(world)
    data, _ = digits(grid, seed=0)
    evidence: dict[str, Evidence] = {}
    trained: dict[str, Ledger] = {}
    shared: dict[tuple[Recipe, str], dict[str, Tensor]] = {}
    for name, recipe in recipes.items():
        problem = problem_of(recipe, data, grid.tp.size)
        grid.ledger.clear()
        run = train_on_grid(problem, grid)
        trained[name] = copy.deepcopy(grid.ledger)
        key = replace(recipe, dtype="")
        for kind, other in (("float64", problem.wide), ("unrounded", problem.unrounded)):
            if (key, kind) not in shared:
                shared[key, kind] = run.parameters if other is problem else train_on_grid(other, grid).parameters
        unrounded = None if problem.unrounded is problem else shared[key, "unrounded"]
        agree = replicas_agree(run.parameters, grid)
        found = Evidence(run, exact_on_grid(problem, grid), shared[key, "float64"], unrounded, agree)
        if world.rank == 0:
            evidence[name] = found
    return Witness(
        evidence, trained, {name: count(make(grid.tp), grid) for name, make in CASES.items()} if cases else {}
    )


def compare_replicas(world: World, culprit: int | None) -> bool:
    """Return on rank 0 whether replicas agree, when one rank's copy is off by one ulp in one element."""
    parameters = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    if world.rank == culprit:
        parameters["b"][1] = torch.nextafter(parameters["b"][1], torch.tensor(2, dtype=torch.bfloat16))
    return replicas_agree(parameters, Grid.of(world))


# ---- Counted steps ----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One step to be counted.

    groups: named parameters per algorithm. backward: gives every parameter a gradient. activations: adds what that
    sends to a ledger.
    """

    groups: list[dict[str, Any]]
    backward: Callable[[], object]
    activations: Callable[[Ledger], object] = lambda ledger: None
    bucket_size: int = 1000
    strategy: str = "gather_all"
    publish: str = "parameters"
    whole_every: int | None = None  # for `periodic` alone

    def named(self) -> list[tuple[str, nn.Parameter, str]]:
        """Return (name, parameter, algorithm) in the order of the map."""
        return [(*pair, group["algorithm"]) for group in self.groups for pair in group["params"]]

    @property
    def muon(self) -> list[int]:
        return [index for index, (_, _, algorithm) in enumerate(self.named()) if algorithm == "muon"]

    def layout(self, dp: int, tp: int = 1) -> Layout:
        return plan_groups(self.groups, dp, self.bucket_size, tp, strategies.planner(self.strategy))[0]

    def predict(self, dp: int, tp: int, rank: int) -> Ledger:
        """Return the step's ledger on a rank of the grid; any process can."""
        dp_rank, tp_rank = divmod(rank, tp)
        whole = None if self.whole_every in (None, 1) else ()  # the first step, which is the one that is counted
        ledger = predict_step(
            self.layout(dp, tp), tp, dp_rank, self.muon, self.strategy, None, tp_rank, self.publish, whole
        )
        self.activations(ledger)
        return ledger


def network(model: nn.Module, inputs: Tensor, tp: Group, algorithm: str) -> Case:
    """Return two micro-batches through a model of ours."""
    item_bytes = next(model.parameters()).element_size()
    rows = inputs.numel() if isinstance(model, Transformer) else len(inputs)

    def backward() -> None:
        for _ in range(2):
            model(inputs).float().square().mean().backward()

    def activations(ledger: Ledger) -> None:
        for _ in range(2):
            model.predict_activations(ledger, rows, item_bytes, tp.size)  # type: ignore[operator]

    groups = [group | {"algorithm": algorithm or group["algorithm"]} for group in split_parameters(model)]
    return Case(groups, backward, activations)


def mlp(tp: Group, algorithm: str = "") -> Case:
    return network(MLP((12, 16, 8, 8, 5), tp), torch.ones(3, 12), tp, algorithm)


def transformer(tp: Group, algorithm: str = "", dtype: torch.dtype = torch.float32) -> Case:
    model = Transformer(vocabulary=11, width=16, layers=2, heads=8, context=6, tp=tp).to(dtype)
    return network(model, torch.arange(10).view(2, 5), tp, algorithm)


def loose(algorithm: str, bucket_size: int, *parameters: tuple[tuple[int, ...], int | None, torch.dtype]) -> Case:
    """Return parameters without a model, (TP-local shape, tp_split_dim, dtype); their gradients are set by hand."""
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for position, (shape, dim, dtype) in enumerate(parameters):
        parameter = mark(nn.Parameter(torch.ones(shape, dtype=dtype)), dim)
        parameter.grad = torch.ones_like(parameter)
        groups.setdefault(algorithm if len(shape) == 2 else "adamw", []).append((f"p{position}", parameter))
    named = [{"params": params, "algorithm": name} for name, params in groups.items()]
    return Case(named, lambda: None, bucket_size=bucket_size)


def ragged(tp: Group, algorithm: str = "muon") -> Case:
    """Three buffers, several buckets, padding nearly everywhere, and ranks that own nothing."""
    f32, bf16, f64 = torch.float32, torch.bfloat16, torch.float64
    return loose(
        algorithm, 40,
        ((1, 1), None, f32), ((3, 5), 0, f32), ((13, 7), 1, f32), ((5,), 0, f32),
        ((10, 12), 0, bf16), ((5,), None, bf16), ((4, 7), None, f64), ((3,), None, f64),
    )  # fmt: skip


def squares(tp: Group, algorithm: str = "muon", dtype: torch.dtype = torch.float32) -> Case:
    """Matrices alone, two in a bucket, without padding for any D that divides 256."""
    return loose(algorithm, 512, *[((16, 16), None, dtype)] * 4)


def several(tp: Group, names: str = "") -> Case:
    """Parameters that hold several matrices each. names: of some of them, by a word; all of them by default."""
    case = optimizer_cases.several(tp.size)
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in case.groups]
    for w in [w for w in case.weights if names in w.name]:
        parameter = mark(nn.Parameter(torch.ones(w.shape)), w.dim)
        parameter.grad = torch.ones_like(parameter)
        groups[w.group]["params"].append((w.name, parameter))
    return Case([group for group in groups if group["params"]], lambda: None, bucket_size=300)


def by(strategy: str, make: Callable[[Group], Case], bucket_size: int = 1000) -> Callable[[Group], Case]:
    """Return the same step by another strategy."""
    return lambda tp: make(tp)._replace(strategy=strategy, bucket_size=bucket_size)


CASES: dict[str, Callable[[Group], Case]] = {
    "mlp": mlp,
    "mlp, adamw": partial(mlp, algorithm="adamw"),
    "transformer": transformer,
    "ragged": ragged,
    "ragged, adamw": partial(ragged, algorithm="adamw"),
    "squares": squares,
    "squares, adamw": partial(squares, algorithm="adamw"),
    "squares, bf16": partial(squares, dtype=torch.bfloat16),
    "squares, bf16, adamw": partial(squares, algorithm="adamw", dtype=torch.bfloat16),
    "transformer, gather_cut, flat": by("gather_cut", transformer, FLAT),
    "ragged, gather_cut": by("gather_cut", ragged, 40),
    "transformer, owner": by("owner", partial(transformer, dtype=torch.bfloat16)),
    "ragged, owner": by("owner", ragged, 40),
    "ragged, owner, flat": by("owner", ragged, FLAT),
    "mlp, owner, updates": lambda tp: by("owner", mlp, 100)(tp)._replace(publish="updates"),
    "mlp, blockwise": by("blockwise", mlp, 100),
    "ragged, periodic, whole": lambda tp: by("periodic", ragged, 40)(tp)._replace(whole_every=1),
    "ragged, periodic, in blocks": lambda tp: by("periodic", ragged, 40)(tp)._replace(whole_every=2),
    "several matrices": several,
    "several matrices, gather_cut": by("gather_cut", several, 300),
    "several matrices, owner": by("owner", several, 300),
    "several matrices, owner, updates": lambda tp: by("owner", several, 300)(tp)._replace(publish="updates"),
    "several matrices, blockwise": by("blockwise", several, 300),
    "heads alone, owner": by("owner", partial(several, names="heads")),
}


def count(case: Case, grid: Grid) -> tuple[Ledger, Ledger, Ledger]:
    """Make the step; return our ledger, the dispatcher's, and the prediction."""
    prediction = case.predict(grid.dp.size, grid.tp.size, grid.world.rank)
    optimizer: ShardedOptimizer
    if case.muon:
        own = {} if case.whole_every is None else {"whole_every": case.whole_every}
        optimizer = DistributedMuon(
            case.groups,
            grid,
            bucket_size=case.bucket_size,
            strategy=case.strategy,
            publish=case.publish,
            strategy_options=own,
        )
    else:
        optimizer = Zero1AdamW(case.groups, grid, bucket_size=case.bucket_size)
    grid.ledger.clear()
    with CollectiveCounter() as counter:
        case.backward()
        optimizer.step()
    return copy.deepcopy(grid.ledger), counter.ledger, prediction


def recipes_on(dp: int, tp: int) -> dict[str, Recipe]:
    """Return what is trained on a grid: the tiny models on all, every strategy where grids differ in kind.

    What differs from grid to grid, the map and the groups, tiny models show as well; chapter 10 trains the recipe on
    all. On eight ranks a strategy is the same for both dtypes, and on 32 the model is.
    """
    if (dp, tp) not in GRIDS:
        return {name: r for name, r in TINY.items() if dp * tp <= 8 or r.dtype == "float32"}
    if (dp, tp) in ((1, 1), (2, 2)):
        return EVERY
    return TINY | {name: r for name, r in (BEYOND | OTHERS).items() if dp * tp <= 4 or r.dtype == "float32"}


def on_grids(recipes: Mapping[str, Recipe]) -> list[tuple[int, int, str]]:
    """Return (dp, tp, name) of each of these that is trained, grid by grid."""
    return [(*grid, name) for grid in GRIDS + OTHER_GRIDS for name in recipes if name in recipes_on(*grid)]


@functools.cache
def problem_alone(recipe: Recipe, tp: int = 1) -> Problem:
    """Return what one process trains; the same object each time, so that its runs can be remembered."""
    return problem_of(recipe, digits(Grid.alone(), recipe.seed)[0], tp)


@functools.cache
def witnesses(dp: int, tp: int) -> list[Witness]:
    """Return what every rank of a dp x tp grid hands over; each grid is started once, when first asked for."""
    return launch.run(run_cases, (recipes_on(dp, tp), (dp, tp) in GRIDS), dp=dp, tp=tp)
