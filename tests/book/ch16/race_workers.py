"""Workers for tests/book/ch16, at the top level of a module, where ranks find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.launch import World
from distmuon.optim.newton_schulz import polar_factor
from distmuon.sharding.grid import Grid
from muonbook.ch16.race import four_ranks, training_step
from muonbook.measure.workload import SHAPES
from muonbook.peers import make_importable


def first_steps(world: World, others: Sequence[str], folder: str | None) -> dict[str, list[float | None]]:
    """Let everybody take one step; return, matrix by matrix, the cosine of the way it went and the polar factor's.

    None: it has not moved on this rank.
    """
    make_importable(others, folder)
    grid, matrices = (
        Grid.of(world),
        four_ranks.Matrices.of_layers(2, 64),
    )  # two of each shape: Keller Jordan's takes as many as ranks
    polar = four_ranks.Matrices(matrices.shapes, matrices.tp_split_dims, [polar_factor(g) for g in matrices.gradients])
    found: dict[str, list[float | None]] = {}
    for name, make in four_ranks.entrants(matrices, grid, others).items():
        entrant = make()
        entrant.feed()
        entrant.step()
        ways = zip(map(_whole, entrant.parameters), polar.of_rank(grid), strict=True)
        found[name] = [_cosine(-moved.double(), exact) if bool(moved.any()) else None for moved, exact in ways]
    return found


def small_race(world: World, rounds: int, matrix_unit: bool = True) -> dict[str, Any] | None:
    return four_ranks.race(world, rounds, [], None, False, layers=1, width=64, matrix_unit=matrix_unit)


def small_training(world: World, matrix_unit: bool) -> list[dict[str, Any]] | None:
    return training_step.compare(world, (1, 2), 2, SHAPES["odd"], matrix_unit)


def _whole(parameter: Any) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.reshape(-1), b.reshape(-1), dim=0))
