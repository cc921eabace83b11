"""One training step on the scales: what a baseline keeps, and what each stage of its step holds besides.

Everything is counted on storages (`model_states`, `memory_tracker`) and, where a layout decides it, predicted before.
Bytes do not depend on what the numbers are, so the tokens are made up. Newton–Schulz computes in float32 here unless
told otherwise: by default it would take bf16 on processors that multiply it natively, and counts would differ between
machines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.sharding.grid import Grid
from distmuon.verify.memory_tracker import Moment, StorageTracker, references, size_of
from distmuon.verify.model_states import ModelStates, count
from muonbook.measure.trace import named_moves
from muonbook.measure.trainers import Trainer
from muonbook.measure.workload import Workload
from muonbook.runnable_baselines import RUNNABLE

PASSES = ("forward", "backward")  # stages before the update
WARM = 2  # steps before the one that is weighed: state is made in the first, and DDP arranges itself


class Weighed(NamedTuple):
    """One rank's step, in bytes.

    states: per kind, between backward pass and update. predicted: the same, from shapes alone. standing: what is there
    before the step begins, and after it. bound: predicted for `transient`; None where torch's own planning decides.

    Of a step that was tracked: stages: the most that was alive beyond `standing`, per stage. transient: the most that
    the update allocated beyond what was there when it began. history: of the whole step, beyond `standing`.
    """

    states: ModelStates
    predicted: ModelStates
    standing: int
    bound: int | None
    stages: dict[str, int]
    transient: int
    history: list[Moment]

    @property
    def peak(self) -> int:
        """The most that the rank held at any moment of the step."""
        return self.standing + max(self.stages.values())


def weigh(
    name: str, workload: Workload, grid: Grid, tracked: bool = True, compute_dtype: str | None = "float32"
) -> Weighed:
    """Train the baseline `name` for a few steps and weigh the last. Collective.

    tracked: follow a whole step, operator by operator; else only what is kept is counted. compute_dtype: of
    Newton–Schulz; None leaves it to the optimizer, and then there is no bound.
    """
    trainer = RUNNABLE[name].make(workload, grid)
    if compute_dtype:
        compute_in(trainer, getattr(torch, compute_dtype))
    ids = _tokens(workload, grid)
    states, there = ModelStates(), list[StorageWeakRef]()

    def look() -> None:
        nonlocal states, there
        states, there = count(trainer.tensors()), _references(trainer)

    for _ in range(WARM):
        trainer.step((ids, ids), look)
    there = [ref for ref in there if size_of(ref) is not None]  # without gradients that live from step to update
    standing = sum(size_of(ref) or 0 for ref in there)
    place = (grid.dp.size, grid.tp.size, grid.dp.rank)
    predicted = RUNNABLE[name].states(workload, *place)
    at_once = takes_all_at_once(grid.device)
    update_bound = RUNNABLE[name].update
    bound = update_bound(workload, *place, compute_dtype, at_once) if update_bound and compute_dtype else None
    found = Weighed(states, predicted, standing, bound, {}, 0, [])
    if not tracked:
        return found
    homes = _homes(trainer)
    with StorageTracker([*there, *homes, *references([ids])], grid.device) as whole:
        with whole.during("forward"), _backward_after(trainer, whole):
            trainer.forward_backward(ids, ids)
        update = StorageTracker([*_references(trainer), *homes], grid.device)
        with update, whole.during("update"), named_moves(whole.during):
            trainer.update()
    return found._replace(stages=whole.peaks(), transient=update.peak, history=whole.history)


def takes_all_at_once(device: torch.device) -> bool:
    """Return whether torch's AdamW, left to itself, takes all tensors of a call at once on this device."""
    return device.type != "cpu"


def _references(trainer: Trainer) -> list[StorageWeakRef]:
    return references(tensor for tensors in trainer.tensors().values() for tensor in tensors)


def _homes(trainer: Trainer) -> list[StorageWeakRef]:
    """Return that by which parameters and gradients lie in flat storages: other storages, the same memory."""
    buffers = [one.buffers for one in trainer.optimizers if isinstance(one, ShardedOptimizer)]
    return references(home for one in buffers for home in (*one.parameter_homes, *one.gradient_homes))


def compute_in(trainer: Trainer, dtype: torch.dtype) -> None:
    """Let Newton–Schulz of our own optimizers compute in `dtype`; torch's computes in bf16, whatever one wants."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            if "compute_dtype" in group:
                group["compute_dtype"] = dtype


def _tokens(workload: Workload, grid: Grid) -> Tensor:
    """Return this DP rank's share of a made-up batch of token ids, [sequences / D, context]."""
    each = workload.sequences // grid.dp.size
    numbers = torch.arange(each * workload.context, device=grid.device) % workload.vocabulary
    return numbers.view(each, workload.context)


@contextlib.contextmanager
def _backward_after(trainer: Trainer, tracker: StorageTracker) -> Iterator[None]:
    """Call what follows the model's forward pass, loss included, "backward"."""

    def enter(*_: Any) -> None:
        tracker.stage = "backward"

    handle = trainer.model.register_forward_hook(enter)
    try:
        yield
    finally:
        handle.remove()


# ---- A second count ---------------------------------------------------------------------------------------


def allocated_peak(run: Callable[[], object]) -> int:
    """Return the most that `run()` allocated on the CPU and had not freed, in bytes, by torch.profiler's records.

    They also have what an operator takes and gives back within itself.
    """
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:  # else 2.11 warns
        run()
    records = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in records if event.name() == "[memory]")
    alive = worst = 0
    for _, change in changes:
        alive += change
        worst = max(worst, alive)
    return worst


def cross_check(name: str, workload: Workload, grid: Grid) -> tuple[int, int]:
    """Return the peak of an update, on a grid of one rank, by StorageTracker and by the allocator."""
    trainer = RUNNABLE[name].make(workload, grid)
    ids = _tokens(workload, grid)
    found = []
    for step in range(3):
        trainer.forward_backward(ids, ids)
        if step == 0:
            trainer.update()
        elif step == 1:
            found.append(allocated_peak(trainer.update))
        else:
            with StorageTracker([*_references(trainer), *_homes(trainer)], grid.device) as tracker:
                trainer.update()
            found.append(tracker.peak)
    return found[1], found[0]


# ---- Stored -----------------------------------------------------------------------------------------------


def packed(history: list[Moment]) -> str:
    """Return a history in one short line: "forward 512 512 1024; backward ..."; `unpacked` reads it."""
    runs: list[list[str]] = []
    before = None
    for stage, alive in history:
        if stage != before:
            runs.append([stage])
        runs[-1].append(str(alive))
        before = stage
    return "; ".join(" ".join(run) for run in runs)


def unpacked(text: str) -> list[Moment]:
    """Return the history that `packed` has written."""
    return [Moment(run.split()[0], int(alive)) for run in text.split("; ") for alive in run.split()[1:]]
