"""What a certificate trains: a model, batches, a loss and an optimizer, on a grid or in one process.

Both start from the same whole weights and read the same rows. The global batch is cut into the same micro-batches on
every grid: DP rank r runs its share of them and accumulates, one process runs them all.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from distmuon.optim.param_groups import reshard
from distmuon.sharding.grid import Grid
from distmuon.sharding.ledger import Ledger
from distmuon.sharding.tensor_parallel import load_slices, whole_parameters
from distmuon.verify.blueprint import Blueprint, set_option
from distmuon.verify.bounds import FEW_STEPS

EXACT_STEPS = 3


@dataclass(frozen=True, eq=False)
class Problem:
    """A training, without a word on where it runs.

    make_model, make_optimizer, batches, loss, steps, dtype, seed: as `certify` takes them.
    micro_batches: pieces of a batch, over all ranks.
    blueprint: what one process steps with instead of the sharded optimizer.
    wire: in which the momentum travels and Newton–Schulz computes; None: as the optimizer has it.
    """

    make_model: Callable[..., nn.Module]
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    make_optimizer: Callable[..., Any]
    steps: int
    micro_batches: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    blueprint: Blueprint = field(default_factory=Blueprint)
    wire: torch.dtype | None = None

    @cached_property
    def wide(self) -> Problem:
        """The same training in float64, what travels included."""
        if self.dtype == torch.float64 and not self.blueprint.rounds(torch.float64):
            return self
        return replace(self, dtype=torch.float64, wire=torch.float64 if self.blueprint.has_muon else None)

    @cached_property
    def unrounded(self) -> Problem:
        """The same training in float32 throughout, of a few steps; the problem itself if it rounds nothing to bf16."""
        if self.dtype.itemsize >= 4 and (self.wire is not None or not self.blueprint.rounds(self.dtype)):
            return self
        wire = torch.float32 if self.blueprint.has_muon else None
        return replace(self, dtype=torch.float32, wire=wire, steps=min(self.steps, FEW_STEPS))

    @property
    def exact_steps(self) -> int:
        """How many steps the exact row makes: enough for whole and block steps, where there are both."""
        return max(EXACT_STEPS, min(self.blueprint.period, self.steps) + 1)

    @cached_property
    def start(self) -> dict[str, Tensor]:  # name -> W[I, J]
        """The whole initial weights, in the run's dtype."""
        return {name: p.detach().clone() for name, p in self.model(torch.device("cpu")).named_parameters()}

    def model(self, device: torch.device, **cut: Any) -> nn.Module:
        """Return the model in the run's dtype, whole, or with cut="tp": group, over that group if it can be cut."""
        given = {name: group for name, group in cut.items() if name in inspect.signature(self.make_model).parameters}
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            torch.manual_seed(self.seed)
            return self.make_model(**given).to(device, self.dtype)

    def on_grid(self, grid: Grid) -> tuple[nn.Module, nn.Module, Any]:
        """Return this rank's model from the whole initial weights, what calls it, and its optimizer. Collective."""
        model = self.model(grid.device, tp=grid.tp)
        load_slices(model, {name: w.to(grid.device) for name, w in self.start.items()}, grid.tp)
        made = self.make_optimizer(model, grid, **({} if self.wire is None else {"gather_dtype": self.wire}))
        caller, optimizer = made if isinstance(made, tuple) else (model, made)
        if self.wire is not None:
            set_option(optimizer, "compute_dtype", self.wire)
        return model, caller, optimizer

    def piece(self, batch: Any, number: int, device: torch.device) -> Any:
        """Return one micro-batch of a global batch, on the device, its floating-point numbers in the run's dtype."""
        size = rows_of(batch) // self.micro_batches

        def cut(t: Tensor) -> Tensor:
            rows = t[number * size : (number + 1) * size] if t.ndim else t
            return rows.to(device, self.dtype if t.is_floating_point() else t.dtype)

        return tree_map_only(Tensor, cut, batch)


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch: the first dimension of all its tensors, or 0 where they do not agree."""
    sizes = {len(t) for t in tree_leaves(batch) if isinstance(t, Tensor) and t.ndim}
    return sizes.pop() if len(sizes) == 1 else 0


@dataclass
class Run:
    """What a run leaves. parameters: whole, after the last step. seconds_per_step: median, first step left out."""

    losses: list[float]
    parameters: dict[str, Tensor]
    seconds_per_step: float


def train(
    problem: Problem,
    micro_batches: range,
    model: nn.Module,
    step: Callable[[], object],
    after_backward: Callable[[], object] = lambda: None,
    reduce_loss: Callable[[Tensor], Tensor] = lambda loss: loss,
    tick: Callable[[], object] = lambda: None,
) -> tuple[list[float], float]:
    """Run the loop that every start shares; return the losses and the median seconds per step.

    micro_batches: those that this process runs, in this order. after_backward: after each of them. reduce_loss: the
    mean over DP. tick: after each step, for a progress bar.
    """
    losses, seconds = [], []
    device = next(model.parameters()).device
    for number in range(problem.steps):
        began = time.perf_counter()
        batch = problem.batches[number]
        total = torch.zeros((), dtype=torch.float64, device=device)
        for micro in micro_batches:
            loss = problem.loss(model, problem.piece(batch, micro, device)) / len(micro_batches)
            loss.backward()
            after_backward()
            total += loss.detach()
        step()
        losses.append(reduce_loss(total).item())
        seconds.append(time.perf_counter() - began)
        tick()
    return losses, statistics.median(seconds[1:] or seconds)


def train_on_grid(problem: Problem, grid: Grid, tick: Callable[[], object] = lambda: None) -> Run:
    """Train on this grid; all ranks call it together. Losses are means over the global batch, on every rank."""
    model, caller, optimizer = problem.on_grid(grid)
    micro_batches = problem.micro_batches // grid.dp.size

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()  # ours have done so, others leave it to the loop

    losses, seconds = train(
        problem,
        range(grid.dp.rank * micro_batches, (grid.dp.rank + 1) * micro_batches),
        caller,
        step,
        reduce_loss=lambda loss: grid.dp.all_reduce(loss, "loss") / grid.dp.size,
        tick=tick,
    )
    return Run(losses, whole_weights(model, grid), seconds)


def whole_weights(model: nn.Module, grid: Grid) -> dict[str, Tensor]:  # name -> W[I, J]
    """Return copies of the whole parameters, gathered from TP ranks or from the shards of DTensors. Collective."""
    reshard(model)
    whole = whole_parameters(model, replace(grid.tp, ledger=Ledger()))
    return {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in whole.items()}
