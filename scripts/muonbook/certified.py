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
from distmuon.verify.bounds import CONTROL_FACTOR, Drift
from distmuon.verify.certificate import References, exact_on_grid, identical, judging, replicas_agree
from distmuon.verify.problem import Problem, Run, train_on_grid
from distmuon.verify.training import predict_run, problem_of


class CertifiedRun(NamedTuple):
    """What rank 0 has in hand after a training. ledgers: one per rank. replicas_agree: on whole parameters, bitwise.

    exact, unrounded: whole parameters after the exact certificate's steps, and after the training of
        `Problem.unrounded`, on `device`.
    """

    losses: list[float]
    ledgers: list[Ledger]
    replicas_agree: bool
    exact: dict[str, Tensor]
    unrounded: dict[str, Tensor]
    device: torch.device


class Checked(NamedTuple):
    """What the judge says. as_predicted: every rank's ledger is the one in `predicted`.

    exact: bitwise equal to one process. drift: of the training in float32 throughout, and of its control.
    """

    exact: bool
    drift: Drift
    as_predicted: bool
    predicted: list[Ledger]

    @property
    def unrounded(self) -> bool:
        """Whether the training in float32 is not further from one process than its control allows."""
        return self.drift.passed is True

    @property
    def measured(self) -> str:
        """The numbers behind `unrounded`, for a printed line."""
        difference, control = self.drift.difference, self.drift.control
        return f"difference {difference:.1e}, control {control:.1e}, at most {CONTROL_FACTOR:g} x the control"


def counted(problem: Problem, grid: Grid) -> tuple[Run, Ledger]:
    """Train with the ledger open; return the run and what was sent in it. Collective."""
    grid.ledger.clear()
    run = train_on_grid(problem, grid)
    return run, copy.deepcopy(grid.ledger)


def on_digits(recipe: Recipe, grid: Grid) -> Problem:
    """Return what a recipe trains, with the data on the grid's device. Collective."""
    return problem_of(recipe, digits(grid, recipe.seed)[0], grid.tp.size)


def train(world: World, recipe: Recipe, grid: Grid) -> CertifiedRun | None:
    """Train, then make the certificate's own runs; None on all ranks but 0. Collective."""
    problem = on_digits(recipe, grid)
    run, ledger = counted(problem, grid)
    ledgers, agree = world.gather(ledger), replicas_agree(run.parameters, grid)
    exact = exact_on_grid(problem, grid).parameters
    unrounded = run if problem.unrounded is problem else train_on_grid(problem.unrounded, grid)
    if ledgers is None:
        return None
    return CertifiedRun(run.losses, ledgers, agree, exact, unrounded.parameters, grid.device)


def judge(run: CertifiedRun, recipe: Recipe, dp: int, tp: int, threads: int) -> Checked:
    """Make the certificate's single-process side here, and predict every ledger. threads: as many as a rank had."""
    problem = problem_of(recipe, digits(Grid.alone(str(run.device)), recipe.seed)[0], tp)
    with judging(run.device, threads):
        references = References.make(problem, run.device, dp, full=False)
    exact = identical(run.exact, references.exact)
    drift = references.drift(problem.unrounded, run.unrounded)
    predicted = [predict_run(recipe, dp, tp, rank) for rank in range(dp * tp)]
    return Checked(exact, drift, predicted == run.ledgers, predicted)
