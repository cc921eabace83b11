"""Which optimizers race, and over which settings each of them is tuned.

Learning rate, the ratio of the other parameters' rate to the hidden matrices', momentum and weight decay are tuned for
all three; AdamW's second beta as well, so its first grid is twice as large. "Momentum" is SGD's, AdamW's first beta,
and Muon's mu: how much of the last steps' gradients is in this step's. The AdamW that trains Muon's other parameters
keeps its betas, which can only cost Muon.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from distmuon.optim.muon import Muon
from distmuon.optim.param_groups import by_algorithm

MOMENTA = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # what tuning goes along, where it goes beyond its first guess
BETAS = (0.9, 0.95)  # of the AdamW that trains Muon's other parameters

Grid = dict[str, tuple[float, ...]]  # field of Setting -> the values to try, rising


@dataclass(frozen=True)
class Setting:
    """One way to run one optimizer.

    lr: of the hidden matrices. others: the learning rate of all other parameters, over `lr`. momentum: SGD's, AdamW's
    first beta, Muon's mu. second_beta: AdamW's, where it races itself.
    """

    optimizer: str
    lr: float
    weight_decay: float
    momentum: float
    others: float = 1.0
    second_beta: float = 0.95

    def at(self, lr: float) -> Setting:
        return replace(self, lr=lr)


@dataclass(frozen=True)
class Racer:
    """An optimizer and where its tuning begins.

    lrs, momenta: a first guess at where the best lies; `sweep` goes on beyond either end while the best is at it.
    usual: the momentum that papers and libraries have. build: (model, setting) -> optimizers, stepped in turn.
    """

    title: str
    lrs: tuple[float, ...]
    momenta: tuple[float, ...]
    usual: float
    weight_decays: tuple[float, ...]
    build: Callable[[nn.Module, Setting], list[Optimizer]]
    second_betas: tuple[float, ...] = (0.95,)

    def grid(self, rates_alone: bool = False) -> Grid:
        """Return what to try first. rates_alone: learning rates, and everything else as usual."""
        if rates_alone:
            usual = {"weight_decay": self.weight_decays[-1], "momentum": self.usual, "others": 1.0, "second_beta": 0.95}
            return {"lr": self.lrs} | {name: (value,) for name, value in usual.items()}
        return {
            "lr": self.lrs,
            "weight_decay": self.weight_decays,
            "momentum": self.momenta,
            "others": (0.25, 1.0, 4.0),
            "second_beta": self.second_betas,
        }


def settings(name: str, grid: Grid) -> list[Setting]:
    """Return all settings of a grid."""
    return [Setting(name, **dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]


def is_usual(setting: Setting) -> bool:
    """Say whether only learning rate, weight decay and second beta of this setting were chosen."""
    return (setting.momentum, setting.others) == (RACERS[setting.optimizer].usual, 1.0)


def widened(grid: Mapping[str, Sequence[float]], best: Setting) -> Grid:
    """Return the grid with one more value beyond each end at which the best setting stands; a fixed one has no end."""
    return {name: _widened(name, tuple(values), getattr(best, name)) for name, values in grid.items()}


def _widened(name: str, values: tuple[float, ...], best: float) -> tuple[float, ...]:
    if name == "momentum" and len(values) > 1:
        below, above = [m for m in MOMENTA if m < best][-1:], [m for m in MOMENTA if m > best][:1]
    elif name in ("lr", "others") and len(values) > 1:
        factor = 2 if name == "lr" else 4
        below, above = [best / factor], [best * factor]
    else:
        return values
    return (*(below if best == values[0] else ()), *values, *(above if best == values[-1] else ()))


def doubling(low: float) -> tuple[float, ...]:
    """Return six learning rates, each twice the one before."""
    return tuple(low * 2**n for n in range(6))


# ---- The three --------------------------------------------------------------------------------------------


def _groups(model: nn.Module, setting: Setting) -> list[dict[str, Any]]:
    params, decay = by_algorithm(model), setting.weight_decay
    return [
        {"params": params["muon"], "lr": setting.lr, "weight_decay": decay},
        {"params": params["adamw"], "lr": setting.lr * setting.others, "weight_decay": decay},
    ]


def _sgd(model: nn.Module, setting: Setting) -> list[Optimizer]:
    return [SGD(_groups(model, setting), momentum=setting.momentum, nesterov=True)]


def _adamw(model: nn.Module, setting: Setting) -> list[Optimizer]:
    return [AdamW(_groups(model, setting), betas=(setting.momentum, setting.second_beta))]


def muon_and_adamw(
    params: Mapping[str, Sequence[nn.Parameter]], setting: Setting, muon: Callable[..., Optimizer] = Muon
) -> list[Optimizer]:
    """Return Muon for the one part and AdamW for the other, at one weight decay, as the paper has it.

    params: {"muon": matrices, "adamw": the rest}. muon: another form of it.
    """
    decay = setting.weight_decay
    return [
        muon(params["muon"], lr=setting.lr, momentum=setting.momentum, weight_decay=decay),
        AdamW(params["adamw"], lr=setting.lr * setting.others, betas=BETAS, weight_decay=decay),
    ]


def _muon(model: nn.Module, setting: Setting, **options: Any) -> list[Optimizer]:
    return muon_and_adamw(by_algorithm(model), setting, functools.partial(Muon, **options))


MUON = Racer("Muon", doubling(0.004), (0.8, 0.9, 0.95), 0.95, (0.0, 0.1), _muon)
VARIANT_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> title, and what it changes of Muon
    "polar_express": ("Polar Express", {"ns_coefficients": "polar_express"}),
    "cans": ("CANS", {"ns_coefficients": "cans"}),
    "deepseek_v4": ("DeepSeek-V4's ten steps", {"ns_coefficients": "deepseek_v4", "ns_steps": 10}),
    "cubic5": ("five cubics", {"ns_coefficients": "cubic5"}),
    "muoneq": ("MuonEq, rows", {"input_norm": "rows"}),
    "muon_plus": ("Muon+, rows and columns", {"output_norm": "rows_columns"}),
    "normuon": ("NorMuon", {"normuon_beta2": 0.95}),
    "cautious": ("cautious decay", {"cautious_decay": True}),
}
RACERS: dict[str, Racer] = {
    "sgd": Racer("SGD", doubling(0.025), (0.8, 0.9, 0.95), 0.9, (0.0, 0.003), _sgd),
    "adamw": Racer("AdamW", doubling(0.001), (0.7, 0.8, 0.9), 0.9, (0.0, 0.1), _adamw, (0.95, 0.999)),
    "muon": MUON,
    **{
        name: replace(MUON, title=title, build=functools.partial(_muon, **options))
        for name, (title, options) in VARIANT_OPTIONS.items()
    },
}
