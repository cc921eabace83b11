"""The same training on a DP x TP grid: does sharding change what is learned? The loss curve says no.

The global batch of every step is that of the single process. DP rank r takes its share of the rows, the TP ranks of a
row share a model, the optimizer is the sharded one, and the losses are means over DP. Schedule, looks and initial
weights are `training`'s own. Momentum is gathered in the task's dtype, so that the single process, which gathers
nothing and rounds nothing, does the same arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distmuon.launch import UsageError, World
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.param_groups import groups_for
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.collectives import Group
from distmuon.sharding.grid import Grid
from distmuon.sharding.tensor_parallel import load_slices
from distmuon.verify.bounds import FLOAT64_BOUND
from muonbook.ch04.search_space import BETAS, CANDIDATES, Setting
from muonbook.ch04.tasks import Examples, LearningTask
from muonbook.ch04.training import LossCurve, Outcome, Training, train

SHARDED = ("muon", "adamw")
BOUND = FLOAT64_BOUND  # of the movement: what summing in another order may make of a training in float64
WIDEST = 16  # TP sizes up to this are named as remedies


# ---- Before anything starts -------------------------------------------------------------------------------


def check(task: LearningTask, setting: Setting, dp: int, tp: int) -> None:
    """Raise UsageError where `setting` cannot be trained on `task` on a dp x tp grid as in one process."""
    if setting.optimizer not in SHARDED:
        known = f"has no sharded form here{', only a single-process one' if setting.optimizer in CANDIDATES else ''}"
        raise UsageError(f"optimizer {setting.optimizer!r} {known}; choose one of {', '.join(SHARDED)}.")
    if task.augment is not None or any(isinstance(module, nn.Dropout) for module in _planned(task, 1).modules()):
        raise UsageError(
            f"task {task.name!r} draws random numbers while it trains (dropout, shifted images), and ranks would draw "
            "others than one process; choose digits or language."
        )
    if tp < 1:
        raise UsageError(f"--tp {tp}: must be at least 1.")
    if dp < 1 or task.batch % dp:
        divisors = ", ".join(str(n) for n in range(1, task.batch + 1) if task.batch % n == 0)
        raise UsageError(f"--dp {dp} cannot share out the {task.batch} rows of a batch; choose one of {divisors}.")
    try:
        _planned(task, tp)
    except ValueError as error:
        reason = str(error).partition(";")[0].rstrip(".")
        fitting = ", ".join(str(n) for n in range(1, WIDEST + 1) if _fits(task, n))
        raise UsageError(f"--tp {tp} does not fit: {reason}; choose one of {fitting}.") from error


def _planned(task: LearningTask, tp: int) -> nn.Module:
    """Return the TP-local model without storage; raises ValueError where it cannot be cut."""
    with torch.device("meta"):
        return task.model(Group("tp", tp))


def _fits(task: LearningTask, tp: int) -> bool:
    try:
        _planned(task, tp)
    except ValueError:
        return False
    return True


# ---- The run ----------------------------------------------------------------------------------------------


def sharded_optimizer(model: nn.Module, setting: Setting, grid: Grid, gather_dtype: torch.dtype) -> ShardedOptimizer:
    """Return the candidate's optimizer, its options included, on this rank's shards. Collective.

    A gradient that is not finite ends the run, not the world: see `GridTraining.step`.
    """
    groups = groups_for(model, setting.optimizer)
    names = [group["algorithm"] for group in groups_for(model, "muon")]  # whose matrices are the hidden ones
    for group, name in zip(groups, names, strict=True):
        group["lr"] = setting.lr * (1.0 if name == "muon" else setting.others)
    options: dict[str, Any] = {"lr": setting.lr, "weight_decay": setting.weight_decay, "on_nonfinite": "skip"}
    if setting.optimizer == "adamw":
        return Zero1AdamW(groups, grid, betas=(setting.momentum, setting.second_beta), **options)
    return DistributedMuon(groups, grid, momentum=setting.momentum, betas=BETAS, gather_dtype=gather_dtype, **options)


class GridTraining(Training):
    """This rank's part of a training: its rows of every batch, and of the held-out examples."""

    def __init__(
        self, task: LearningTask, model: nn.Module, optimizer: ShardedOptimizer, seed: int, grid: Grid
    ) -> None:
        optimizers: list[Optimizer] = [optimizer]
        super().__init__(task, model, optimizers, seed)
        self.sharded, self.grid = optimizer, grid
        every = len(self.held_out)
        self.held_out = self.share(self.held_out)
        self.weight = len(self.held_out) / every

    @classmethod
    def of(cls, task: LearningTask, setting: Setting, seed: int, grid: Grid) -> GridTraining:
        """Return the run on this rank of `grid`, before its first step. Collective."""
        task = replace(task, device=str(grid.device))
        model = task.model(grid.tp).to(grid.device, task.dtype)
        load_slices(model, {name: w.to(grid.device) for name, w in task.weights(seed).items()}, grid.tp)
        return cls(task, model, sharded_optimizer(model, setting, grid, task.dtype), seed, grid)

    @property
    def diverged(self) -> bool:
        """Whether a gradient was not finite, on any rank. In one process the weights would be NaN from there on."""
        return self.sharded.skipped_steps > 0

    def share(self, examples: Examples) -> Examples:
        """Return this DP rank's rows of `examples`."""
        n, dp = len(examples), self.grid.dp
        return examples.rows(torch.arange(n * dp.rank // dp.size, n * (dp.rank + 1) // dp.size))

    def batch(self, step: int) -> Examples:
        return self.share(super().batch(step))

    def step(self, step: int) -> float:
        """Take one step; return the loss before it, of the global batch. Collective."""
        return math.inf if self.diverged else self._sum_over_dp(super().step(step) / self.grid.dp.size)

    def look(self) -> tuple[float, float]:
        """Return loss and accuracy on all held-out examples: (inf, 0) where the loss is not finite. Collective."""
        if self.diverged:
            return math.inf, 0.0
        loss, accuracy = (self._sum_over_dp(value * self.weight) for value in super().look())
        return (loss, accuracy) if math.isfinite(loss) else (math.inf, 0.0)

    def _sum_over_dp(self, value: float) -> float:
        """Return the sum over DP in float64: the same number on every rank."""
        mine = torch.tensor(value, dtype=torch.float64, device=self.grid.device)
        return self.grid.dp.all_reduce(mine, "loss").item()


def train_on_grid(world: World, task: LearningTask, setting: Setting, seed: int) -> Outcome:
    """Run `setting` on `task`, sharded over the world's grid; return the same outcome on every rank. Collective.

    Raises UsageError before the grid is made where that cannot be (see `check`).
    """
    check(task, setting, world.dp, world.tp)
    return LossCurve(GridTraining.of(task, setting, seed, Grid.of(world)), setting).outcome()


# ---- Beside the single process ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One training on the grid and in one process."""

    on_grid: Outcome
    alone: Outcome

    @property
    def difference(self) -> float:
        """The largest difference between two losses at the same step, training and held-out, over the movement.

        The movement is how far apart the single process's losses lie, from the largest to the smallest; where only one
        of them is finite, it is that one. Infinite where one of the two runs diverges earlier than the other.
        """
        found, wanted = (run.training + run.held_out for run in (self.on_grid, self.alone))
        if len(found) != len(wanted):
            return math.inf
        largest = max(0.0 if a == b else abs(a - b) for a, b in zip(found, wanted, strict=True))
        if largest in (0.0, math.inf):
            return largest
        finite = [loss for loss in wanted if math.isfinite(loss)]
        return largest / (max(finite) - min(finite) or max(finite))

    def lines(self, rows: int = 5) -> list[str]:
        """Return the two held-out curves at `rows` looks, as a table: step, on the grid, in one process."""
        looks = self.alone.steps
        chosen = sorted({round((len(looks) - 1) * n / max(1, rows - 1)) for n in range(rows)})
        both = list(zip(looks, self.on_grid.held_out, self.alone.held_out, strict=True))
        return ["step   on the grid   in one process"] + [
            f"{step:4d}   {on_grid:11.4f}   {alone:14.4f}" for step, on_grid, alone in (both[n] for n in chosen)
        ]


def compare(world: World, task: LearningTask, setting: Setting, seed: int) -> Comparison | None:
    """Train on the grid, and on rank 0 also in one process; return both there, None on other ranks. Collective.

    The two go in lockstep, so that the other ranks never wait longer than a step for rank 0, however long the run.
    """
    check(task, setting, world.dp, world.tp)
    grid = Grid.of(world)
    curve = LossCurve(GridTraining.of(task, setting, seed, grid), setting)
    if world.rank > 0:
        curve.outcome()
        return None
    alone = train(replace(task, device=str(grid.device)), setting, seed, watch=lambda run, step: curve.advance())
    return Comparison(curve.outcome(), alone)
