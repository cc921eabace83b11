"""A training with its certificate: chapters 6, 8 and 9 count what is sent, and hold the result against one process."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from distmuon.launch import World
from distmuon.models.digits import digits
from distmuon.models.recipe import Recipe
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.verify.certificate import exact_on_grid, exact_verdict, replicas_agree
from distmuon.verify.training import Run, predict_run, train_on_grid


class CertifiedRun(NamedTuple):
    """What rank 0 has in hand after a training. ledgers: one per rank. replicas_agree: on whole parameters, bitwise.

    exact: whole parameters after the exact certificate's steps, on `device`.
    """

    losses: list[float]
    ledgers: list[Ledger]
    replicas_agree: bool
    exact: dict[str, Tensor]
    device: torch.device


class Checked(NamedTuple):
    """exact: bitwise equal to one process. as_predicted: every rank's ledger is the one in `predicted`."""

    exact: bool
    as_predicted: bool
    predicted: list[Ledger]


def counted(recipe: Recipe, grid: Grid) -> tuple[Run, Ledger]:
    """Train with the ledger open; return the run and what was sent in it. Collective."""
    data, _ = digits(grid, recipe.seed)
    grid.ledger.clear()
    run = train_on_grid(recipe, grid, data)
    return run, copy.deepcopy(grid.ledger)


def train(world: World, recipe: Recipe, grid: Grid) -> CertifiedRun | None:
    """Train, then take the exact certificate's steps on made-up gradients; None on all ranks but 0. Collective."""
    run, ledger = counted(recipe, grid)
    ledgers, agree = world.gather(ledger), replicas_agree(run.parameters, grid)
    exact = exact_on_grid(recipe, grid)
    return None if ledgers is None else CertifiedRun(run.losses, ledgers, agree, exact, grid.device)


def judge(run: CertifiedRun, recipe: Recipe, dp: int, tp: int, threads: int) -> Checked:
    """Make the certificate's single-process side here, and predict every ledger. threads: as many as a rank had."""
    exact = exact_verdict(run.exact, recipe, dp, run.device, threads)
    predicted = [predict_run(recipe, dp, tp, rank // tp) for rank in range(dp * tp)]
    return Checked(exact, predicted == run.ledgers, predicted)
