"""Training programs as users of torch write them, and the small model that they train.

A program is given `make`, which builds an optimizer over a model's parameters, and returns the model and what it saw
on the way: losses, learning rates, scales. Nothing in it knows which optimizer it runs: whatever keeps torch's
conventions is trained by it to the weights to which plain arithmetic would be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muon_conformance.reference import gaussian

Make = Callable[[nn.Module], Optimizer]
Trained = tuple[nn.Module, list[Any]]
PROGRAMS: dict[str, Callable[[Make], Trained]] = {}
STEPS = 4


def program(function: Callable[[Make], Trained]) -> Callable[[Make], Trained]:
    """Add a program under its own name."""
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def programs(choices: dict[str, Any]) -> Callable[[Callable[[Make, Any], Trained]], None]:
    """Add a program for each of several values of its second argument."""

    def add(function: Callable[[Make, Any], Trained]) -> None:
        for name, choice in choices.items():
            PROGRAMS[f"{function.__name__.replace('_', ' ')} {name}"] = partial(function, choice=choice)  # type: ignore[call-arg]

    return add


class SmallNet(nn.Module):
    """Two matrices, [8, 6] and [4, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)
        refill(self)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 4]
        return self.second(self.first(x).tanh())


def refill(model: nn.Module, seed: int = 0) -> None:
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(0.3 * gaussian(*p.shape, seed=seed + i))


def loss_of(model: nn.Module, i: int, rows: slice = slice(None)) -> Tensor:
    """Return the mean loss over some rows of batch `i`."""
    dtype = next(model.parameters()).dtype
    x, y = gaussian(8, 6, seed=10 + i, dtype=dtype), gaussian(8, 4, seed=90 + i, dtype=dtype)
    return (model(x[rows]) - y[rows]).square().mean()


def step(model: nn.Module, optimizer: Optimizer, i: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, i)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model: nn.Module, optimizer: Optimizer, steps: int = STEPS, first: int = 0) -> list[float]:
    return [step(model, optimizer, i) for i in range(first, first + steps)]


def change_gradients(model: nn.Module, change: Callable[[Tensor], Tensor | None]) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = change(p.grad)


def sizes(model: nn.Module) -> list[float]:
    return [float(p.detach().norm()) for p in model.parameters()]


def options_of(optimizer: Optimizer) -> list[float]:
    """Return what every scheduler moves."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
