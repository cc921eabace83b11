"""Who races: SGD, AdamW and Muon, and what each is tuned over.

Nobody is compared at a setting that somebody else chose. Every optimizer gets a grid of learning rates (each twice the
one before) and weight decays; SGD and AdamW get a second value for the option that matters most to them as well, so
the baselines are tuned over twice as many settings as Muon. Schedule, model, data and seeds are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from distmuon.optim.muon import Muon
from distmuon.optim.routing import split_parameters


@dataclass(frozen=True)
class Setting:
    """One way to run one optimizer. option: the value of the racer's own option (see `Racer.option`)."""

    optimizer: str
    lr: float
    weight_decay: float
    option: float

    def at(self, lr: float) -> Setting:
        return replace(self, lr=lr)


@dataclass(frozen=True)
class Racer:
    """An optimizer and its grid.

    lrs: a first guess at where the best learning rate lies; `sweep` goes on beyond either end if the best is at it.
    option: the name of what else is tuned. build: (model, setting) -> optimizers, stepped one after the other.
    """

    title: str
    lrs: tuple[float, ...]
    weight_decays: tuple[float, ...]
    option: str
    options: tuple[float, ...]
    build: Callable[[nn.Module, Setting], list[Optimizer]]

    def settings(self, name: str, lr: float) -> list[Setting]:
        """Return all settings at one learning rate."""
        return [Setting(name, lr, decay, option) for decay in self.weight_decays for option in self.options]


def doubling(low: float, count: int) -> tuple[float, ...]:
    """Return `count` learning rates, each twice the one before."""
    return tuple(low * 2**n for n in range(count))


def _sgd(model: nn.Module, setting: Setting) -> list[Optimizer]:
    options: dict[str, Any] = {"momentum": setting.option, "nesterov": True, "weight_decay": setting.weight_decay}
    return [SGD(model.parameters(), lr=setting.lr, **options)]


def _adamw(model: nn.Module, setting: Setting) -> list[Optimizer]:
    options: dict[str, Any] = {"betas": (0.9, setting.option), "weight_decay": setting.weight_decay}
    return [AdamW(model.parameters(), lr=setting.lr, **options)]


def muon_and_adamw(
    matrices: Sequence[nn.Parameter], rest: Sequence[nn.Parameter], setting: Setting, **options: Any
) -> list[Optimizer]:
    """Return Muon for `matrices` and AdamW for the rest, at one learning rate and decay, as the paper has it.

    options: Muon's, such as `ns_steps`.
    """
    lr, decay = setting.lr, setting.weight_decay
    muon = Muon(matrices, lr=lr, weight_decay=decay, momentum=setting.option, **options)
    return [muon, AdamW(rest, lr=lr, weight_decay=decay, betas=(0.9, 0.95))]


def by_algorithm(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (hidden matrices, all else)."""
    found: dict[str, list[nn.Parameter]] = {"muon": [], "adamw": []}
    for group in split_parameters(model):
        found[group["algorithm"]] = [parameter for _, parameter in group["params"]]
    return found["muon"], found["adamw"]


def _muon(model: nn.Module, setting: Setting) -> list[Optimizer]:
    return muon_and_adamw(*by_algorithm(model), setting)


RACERS: dict[str, Racer] = {
    "sgd": Racer("SGD", doubling(0.025, 6), (0.0, 0.003), "momentum", (0.9, 0.95), _sgd),
    "adamw": Racer("AdamW", doubling(0.001, 6), (0.0, 0.1), "second beta", (0.95, 0.999), _adamw),
    "muon": Racer("Muon", doubling(0.004, 6), (0.0, 0.1), "momentum", (0.95,), _muon),
}
