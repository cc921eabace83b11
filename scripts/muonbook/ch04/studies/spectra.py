"""How many directions a matrix uses: its weight, its momentum and its update, along a run.

Singular values tell in how many directions a matrix acts, and how unequally. One number sums them up: the effective
rank, e to the power of the entropy of sigma_i^2 / sum sigma^2 (Roy and Vetterli 2007 take sigma itself for the shares;
the squares are those of Alter et al. 2000, whose entropy Moonlight reports of weights trained with AdamW and Muon).

These runs are in float64, unlike the other studies: an update is the difference of two weights over the learning rate,
and towards the end of the schedule float32 could not hold so small a difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distmuon.extras.metrics.matrix import update_of
from distmuon.launch import World
from distmuon.models import networks
from distmuon.models.language import entropy
from muonbook.ch04 import tasks
from muonbook.ch04.sweep import shared_out
from muonbook.ch04.training import Setting, Training, train

WATCHED = {"up": "blocks.0.up.weight", "out": "blocks.1.out.weight"}  # [256, 64] and [64, 64]
KINDS = ("weight", "momentum", "update")


def effective_rank(matrix: Tensor) -> float:
    """Return the effective rank of a matrix [A, B]: k if k directions share equally.

    It lies between 1 and min(A, B).
    Raises ValueError for a matrix of zeros, or one that is not finite.
    """
    return _effective(_singular_values(matrix))


def _singular_values(matrix: Tensor) -> Tensor:
    values = torch.linalg.svdvals(matrix.double()) if bool(matrix.isfinite().all()) else None
    if values is None or not values.any():
        what = f"a matrix of shape {tuple(matrix.shape)}"
        raise ValueError(f"{what} is not finite or all zero; effective rank needs finite values, one of them not zero.")
    return values


def _effective(values: Tensor) -> float:
    squares = (values / values.max()).square()
    return float(entropy(squares / squares.sum()).exp())


def moments(steps: int) -> list[int]:
    """Return after which steps to look: the first, an eighth, half, seven eighths and all of them."""
    return sorted({max(1, round(steps * share)) for share in (1 / steps, 1 / 8, 1 / 2, 7 / 8, 1)})


def state_of(optimizers: Sequence[Optimizer], parameter: nn.Parameter) -> tuple[Tensor, dict[str, Any]]:
    """Return a parameter's momentum, [A, B], and the group it is in: its learning rate is that of the last step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                state = optimizer.state[parameter]
                return state["exp_avg" if "exp_avg" in state else "momentum_buffer"], group
    raise ValueError(f"no optimizer moves this parameter of shape {tuple(parameter.shape)}.")


def look(run: Training, before: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return {matrix: {kind: [A, B]}} after a step. before: the watched weights before it.

    SGD's decay goes through its momentum as a part of the gradient, so it stays in the update; the others' is taken
    out.
    """
    seen = {}
    for name, path in WATCHED.items():
        weight = run.model.get_parameter(path)
        momentum, group = state_of(run.optimizers, weight)
        decay = 0.0 if isinstance(run.optimizers[0], torch.optim.SGD) else group["weight_decay"]
        update = update_of(before[name], weight.detach(), group["lr"], decay)
        seen[name] = {"weight": weight.detach(), "momentum": momentum, "update": update}
    return seen


def watched(setting: Setting, seed: int, steps: int) -> dict[str, Any]:
    """Train in float64; return {"values", "ranks"}: {matrix: {kind: one entry per moment}}.

    values: the singular values over the largest, from it down. ranks: the effective rank.
    """
    task = tasks.speech(steps=steps).with_dtype("float64")
    model, last = task.fresh_model(seed), dict[str, Tensor]()
    values, ranks = ({name: {kind: list[Any]() for kind in KINDS} for name in WATCHED} for _ in range(2))

    def remember() -> None:
        last.update({name: model.get_parameter(path).detach().clone() for name, path in WATCHED.items()})

    def watch(run: Training, step: int) -> None:
        if step in moments(steps):
            for name, kinds in look(run, last).items():
                for kind, matrix in kinds.items():
                    sigma = _singular_values(matrix)
                    values[name][kind].append([float(f"{v:.4g}") for v in (sigma / sigma.max()).tolist()])
                    ranks[name][kind].append(_effective(sigma))
        remember()

    remember()
    train(task, setting, seed, model=model, watch=watch)
    return {"values": values, "ranks": ranks}


def study(world: World, best: Mapping[str, Setting], seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Watch every optimizer at its best. Collective.

    Return {"steps": the moments, "values": {optimizer: {matrix: {kind: [moment][value]}}} of the first seed, "ranks":
    {optimizer: {matrix: {kind: [seed][moment]}}}}, and the shapes of the matrices.
    """
    jobs = [(name, seed) for name in best for seed in seeds]
    runs = shared_out(world, jobs, lambda job: watched(best[job[0]], job[1], steps))
    found = dict(zip(jobs, runs, strict=True))
    model = tasks.speech().model(networks.ALONE)
    return {
        "steps": moments(steps),
        "shapes": {name: list(model.get_parameter(path).shape) for name, path in WATCHED.items()},
        "values": {name: found[name, seeds[0]]["values"] for name in best},
        "ranks": {
            name: {
                matrix: {kind: [found[name, seed]["ranks"][matrix][kind] for seed in seeds] for kind in KINDS}
                for matrix in WATCHED
            }
            for name in best
        },
    }
