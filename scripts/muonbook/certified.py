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
from distmuon.verify.certificate import References, exact_on_grid, identical, judging, replicas_agree
from distmuon.verify.training import Run, predict_run, train_on_grid


class CertifiedRun(NamedTuple):
    """What rank 0 has in hand after a training. ledgers: one per rank. replicas_agree: on whole parameters, bitwise.

    exact, unrounded: whole parameters after the exact certificate's steps, and after the training of
        `recipe.unrounded`, on `device`.
    """

    losses: list[float]
    ledgers: list[Ledger]
    replicas_agree: bool
    exact: dict[str, Tensor]
    unrounded: dict[str, Tensor]
    device: torch.device


class Checked(NamedTuple):
    """What the judge says. as_predicted: every rank's ledger is the one in `predicted`.

    exact: bitwise equal to one process. unrounded: trained in float32 throughout, not further from one process than
        its control allows.
    """

    exact: bool
    unrounded: bool
    as_predicted: bool
    predicted: list[Ledger]


def counted(recipe: Recipe, grid: Grid) -> tuple[Run, Ledger]:
    """Train with the ledger open; return the run and what was sent in it. Collective."""
    data, _ = digits(grid, recipe.seed)
    grid.ledger.clear()
    run = train_on_grid(recipe, grid, data)
    return run, copy.deepcopy(grid.ledger)


def train(world: World, recipe: Recipe, grid: Grid) -> CertifiedRun | None:
    """Train, then make the certificate's own runs; None on all ranks but 0. Collective."""
    run, ledger = counted(recipe, grid)
    ledgers, agree = world.gather(ledger), replicas_agree(run.parameters, grid)
    exact = exact_on_grid(recipe, grid)
    unrounded = run if recipe.unrounded == recipe else counted(recipe.unrounded, grid)[0]
    if ledgers is None:
        return None
    return CertifiedRun(run.losses, ledgers, agree, exact, unrounded.parameters, grid.device)


def judge(run: CertifiedRun, recipe: Recipe, dp: int, tp: int, threads: int) -> Checked:
    """Make the certificate's single-process side here, and predict every ledger. threads: as many as a rank had."""
    with judging(run.device, threads):
        references = References.make(recipe, dp, run.device, full=False, tp=tp)
    exact = identical(run.exact, references.exact)
    unrounded = references.drift(recipe.unrounded, run.unrounded).passed is True
    predicted = [predict_run(recipe, dp, tp, rank) for rank in range(dp * tp)]
    return Checked(exact, unrounded, predicted == run.ledgers, predicted)
