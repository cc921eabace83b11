"""A worker for tests/book/ch16, at the top level of a module, where ranks find it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distmuon.launch import World
from distmuon.optim.newton_schulz import polar_factor
from distmuon.sharding.grid import Grid
from muonbook.ch16.race import four_ranks
from muonbook.peers import make_importable


def first_steps(world: World, others: Sequence[str], folder: str | None) -> dict[str, list[float]]:
    """Let everybody take one step; return, matrix by matrix, the cosine of the way it went and the polar factor's."""
    make_importable(others, folder)
    grid, matrices = (
        Grid.of(world),
        four_ranks.Matrices.of_layers(2, 64),
    )  # two of each shape: Keller Jordan's takes as many as ranks
    polar = four_ranks.Matrices(matrices.shapes, matrices.tp_split_dims, [polar_factor(g) for g in matrices.gradients])
    found: dict[str, list[float]] = {}
    for name, make in four_ranks.baselines(matrices, grid, others).items():
        baseline = make()
        baseline.feed()
        baseline.step()
        ways = zip(baseline.parameters, polar.of_rank(grid), strict=True)
        found[name] = [_cosine(-moved.detach().double(), exact) for moved, exact in ways]
    return found


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.reshape(-1), b.reshape(-1), dim=0))
