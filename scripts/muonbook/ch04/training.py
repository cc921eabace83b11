"""One run: an optimizer at a setting, a task and a seed in, the losses along the way out.

Schedule, model, data and seeds are the same for all. The learning rate rises over the first twentieth of the steps and
falls along a cosine to zero. A run that diverges is kept, as infinite loss: to be unstable is a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from distmuon.models.digits import batch_rows
from distmuon.models.learning_rate import share_at
from muonbook.ch04.search_space import RACERS, Setting
from muonbook.ch04.tasks import LearningTask, loss_of

LOOKS, APART = 20, 5  # held-out losses along a run, at most; steps between two of them, at least
Build = Callable[[nn.Module, Setting], list[Optimizer]]


@dataclass(frozen=True)
class Outcome:
    """What a run leaves. steps, held_out: when the held-out loss was taken, and it; infinite where it diverged."""

    setting: Setting
    seed: int
    steps: list[int]
    held_out: list[float]

    @property
    def final(self) -> float:
        """The held-out loss after the last step."""
        return self.held_out[-1]


def share_of_lr(step: int, steps: int) -> float:
    """Return by what the learning rate is multiplied at `step`, 0 to steps - 1."""
    warmup = max(1, steps // 20)
    return share_at(step + (step < warmup), steps, warmup)  # the peak lasts two steps


def look_at(steps: int) -> list[int]:
    """Return after which steps the held-out loss is taken; the last one is among them."""
    count = max(1, min(LOOKS, steps // APART))
    return [round(steps * n / count) for n in range(1, count + 1)]


class Training:
    """A model in training, before its first step. build: of the optimizers, where it is not the racer's own."""

    def __init__(self, task: LearningTask, setting: Setting, seed: int, build: Build | None = None) -> None:
        self.task, self.seed, self.model = task, seed, task.fresh_model(seed)
        self.optimizers = (build or RACERS[setting.optimizer].build)(self.model, setting)
        both = task.examples(task, seed)
        (self.inputs, self.targets), self.held_out = ([part.to(task.device) for part in examples] for examples in both)
        self.groups = [(group, group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]

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
        rows = batch_rows(step, self.task.batch, len(self.targets), self.seed).to(self.task.device)
        loss = loss_of(self.model, (self.inputs[rows], self.targets[rows]))
        self.model.zero_grad()
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        loss = loss_of(self.model, self.held_out).item()
        return loss if math.isfinite(loss) else math.inf


def train(
    task: LearningTask,
    setting: Setting,
    seed: int,
    build: Build | None = None,
    watch: Callable[[nn.Module, int], object] = lambda model, step: None,
) -> Outcome:
    """Run `setting` on `task`. watch: called with the model and how many steps it has taken, until it diverges."""
    run, looks, held_out = Training(task, setting, seed, build), look_at(task.steps), list[float]()
    for step in range(1, task.steps + 1):
        if not math.isfinite(run.step(step - 1)):  # nothing comes back from there
            held_out += [math.inf] * (len(looks) - len(held_out))
            break
        if step in looks:
            held_out.append(run.held_out_loss())
        watch(run.model, step)
    return Outcome(setting, seed, looks, held_out)
