"""One run: an optimizer at a setting, a task and a seed in, the losses along the way out.

Schedule, model, data and seeds are the same for all. The learning rate rises over the first twentieth of the steps and
falls along a cosine to zero. A run that diverges is kept, as infinite loss: to be unstable is a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from distmuon.models.digits import batch_rows
from muonbook.ch04.search_space import Setting, candidate
from muonbook.ch04.tasks import Examples, LearningTask, evaluated, loss_of

LOOKS, APART = 20, 5  # held-out losses along a run, at most; steps between two of them, at least

# ---- A run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a run leaves. steps, held_out: when the held-out loss was taken, and it; training: the loss of each step.

    accuracy: on the held-out examples, after the last step.
    """

    setting: Setting
    seed: int
    steps: list[int]
    held_out: list[float]
    training: list[float]
    accuracy: float

    @property
    def final(self) -> float:
        """The held-out loss after the last step; infinite if the run diverged."""
        return self.held_out[-1]


def share_of_lr(step: int, steps: int) -> float:
    """Return by what the learning rate is multiplied at `step`, 0 to steps - 1."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def look_at(steps: int) -> list[int]:
    """Return after which steps the held-out loss is taken; the last one is among them."""
    count = max(1, min(LOOKS, steps // APART))
    return [round(steps * n / count) for n in range(1, count + 1)]


class Training:
    """A model in training. optimizers: at the learning rates that the schedule then scales."""

    def __init__(self, task: LearningTask, model: nn.Module, optimizers: Sequence[Optimizer], seed: int) -> None:
        self.task, self.model, self.optimizers, self.seed = task, model, optimizers, seed
        torch.manual_seed(seed)  # dropout and shifted images draw from it
        self.examples, self.held_out = (examples.to(task.device) for examples in task.examples(task, seed))
        self.groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]

    def batch(self, step: int) -> Examples:
        rows = batch_rows(step, self.task.batch, len(self.examples), self.seed)
        batch = self.examples.rows(rows.to(self.task.device))
        augment = self.task.augment
        return batch if augment is None else Examples(augment(batch.inputs), batch.targets)

    def step(self, step: int) -> float:
        """Take one step; return the loss before it."""
        share = share_of_lr(step, self.task.steps)
        for group, lr in self.groups:
            group["lr"] = lr * share
        loss = self.loss_and_gradients(step)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def loss_and_gradients(self, step: int) -> float:
        """Leave the gradients of this step's batch in the model; return the loss."""
        loss = loss_of(self.model, self.batch(step))
        self.model.zero_grad()
        loss.backward()
        return loss.item()

    def look(self) -> tuple[float, float]:
        """Return loss and accuracy on the held-out examples: (inf, 0) where the loss is not finite."""
        loss, accuracy = evaluated(self.model, self.held_out)
        self.model.train()
        return (loss, accuracy) if math.isfinite(loss) else (math.inf, 0.0)


def started(
    task: LearningTask,
    setting: Setting,
    seed: int,
    build: Callable[[nn.Module, Setting], list[Optimizer]] | None = None,
) -> Training:
    """Return the run of `setting` before its first step. build: see `train`."""
    model = task.fresh_model(seed)
    return Training(task, model, (build or candidate(setting.optimizer).build)(model, setting), seed)


def train(
    task: LearningTask,
    setting: Setting,
    seed: int,
    build: Callable[[nn.Module, Setting], list[Optimizer]] | None = None,
    watch: Callable[[Training, int], object] = lambda run, step: None,
) -> Outcome:
    """Run `setting` on `task`.

    build: of the optimizers, where it is not the candidate's own. watch: called with the run and how many steps it has
    taken, after every step that has not diverged.
    """
    run, looks = started(task, setting, seed, build), look_at(task.steps)
    training: list[float] = []
    held_out: list[float] = []
    accuracy = 0.0  # at the latest look
    for step in range(1, task.steps + 1):
        loss = run.step(step - 1)
        if not math.isfinite(loss):  # nothing comes back from there
            training.append(math.inf)
            held_out += [math.inf] * (len(looks) - len(held_out))
            accuracy = 0.0
            break
        training.append(loss)
        if step in looks:
            loss, accuracy = run.look()
            held_out.append(loss)
        watch(run, step)
    return Outcome(setting, seed, looks, held_out, training, accuracy)
