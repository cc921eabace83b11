"""Chapter 9's training, certified, and what its page measures: real momentum, and the optimizer's cost when T grows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distmuon.launch import World
from distmuon.models.digits import digits
from distmuon.models.networks import Transformer
from distmuon.models.recipe import Recipe
from distmuon.optim.newton_schulz import flops
from distmuon.optim.param_groups import split_parameters
from distmuon.optim.strategies import gather_all
from distmuon.optim.strategies.costs import PlannedRank
from distmuon.sharding.buffers import specs_of
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import plan
from distmuon.verify.certificate import Reference
from distmuon.verify.training import problem_of
from muonbook import certified
from muonbook.certified import CertifiedRun


def train(world: World, recipe: Recipe) -> CertifiedRun | None:
    """Train on 1 x T ranks, under certificate."""
    return certified.train(world, recipe, Grid.of(world))


def report(run: CertifiedRun, recipe: Recipe, tp: int, threads: int) -> tuple[bool, None]:
    """Judge the run; print verdicts and bytes."""
    verdict = certified.judge(run, recipe, 1, tp, threads)
    loss = f"loss {run.losses[0]:.2f} -> {run.losses[-1]:.2f} in {recipe.steps} steps"
    print(f"Muon on {tp} TP ranks, {recipe.dtype}: {loss}.")
    print(f"Same gradients, cut over TP and in one process, bitwise equal parameters: {verdict.exact}.")
    print(f"Trained in float32 throughout, {verdict.measured}: {verdict.unrounded}.")
    print(f"Every rank sees the same whole parameters: {run.replicas_agree}.\n")
    print("A rank sends, per step                          calls   predicted     counted")
    counted = dict(run.ledgers[0])
    for entry, traffic in verdict.predicted[0]:
        calls, _, sent = (total // recipe.steps for total in traffic)
        what = entry.label if entry.op == "all_gather" else entry.label.replace("layers.", "activations, layers.")
        mine = counted[entry].sent_bytes // recipe.steps if entry in counted else 0
        print(f"  {entry.op:<12}{what:<34}{calls:>5}{sent:>12,}{mine:>12,}")
    print(f"Every rank and collective, counted = predicted: {verdict.as_predicted}.")
    return verdict.exact and verdict.unrounded and run.replicas_agree and verdict.as_predicted, None


def momentum_of_digits(steps: int) -> list[Tensor]:
    """Train the digits network with Muon in one process; return the momentum of its three hidden matrices, float64."""
    recipe = Recipe(steps=steps, micro_batches=1, dtype="float64")
    images, _ = digits(Grid.alone(), seed=0)
    reference = Reference(problem_of(recipe, images), torch.device("cpu"))
    reference.train()
    return [state["momentum_buffer"] for state in reference.optimizers[0].state.values()]


class OptimizerCost(NamedTuple):
    """What Muon costs the busiest of `D` x `T` ranks in a step."""

    cut_matrices: int  # of the model's 144: those with more than one owner
    newton_schulz_flops: int
    least_flops: float  # 1/D of what the model's matrices take, each orthogonalized once
    temporary_bytes: int  # at most


def optimizer_cost(T: int, D: int) -> OptimizerCost:
    """Return the cost for a transformer of 24 blocks, 1,024 wide, if all its matrices are gathered, bucketed.

    Query, key and value are matrices of their own.
    """
    sizes = {"vocabulary": 32_768, "width": 1024, "layers": 24, "heads": 16, "context": 1024}
    with torch.device("meta"):  # shapes without storage
        model = Transformer(**sizes, tp=Group("tp", T))
    specs = specs_of(split_parameters(model)[0]["params"])
    layout, all_matrices = plan(specs, D), frozenset(range(len(specs)))
    owners = {index: layout.owners(bucket, index) for bucket in layout.buckets for index in bucket.params}
    costs = [flops(spec.full_shape(T)) for spec in specs]
    work = [sum(costs[index] for index, found in owners.items() if rank in found) for rank in range(D)]
    ranks = [PlannedRank(layout, all_matrices, T, rank, compute_bytes=2) for rank in range(D)]
    cut = sum(len(found) > 1 for found in owners.values())
    return OptimizerCost(cut, max(work), sum(costs) / D, max(map(gather_all.allocates, ranks)))
