"""Which optimizers race, and over which settings each of them is tuned.

Learning rate, the ratio of the other parameters' rate to the
hidden matrices', momentum and weight decay are tuned for all three; AdamW's second beta as well, so its first grid is
twice as large. "Momentum" is SGD's, AdamW's first beta, and Muon's mu: how much of the last steps' gradients is in this
step's. The AdamW that trains Muon's other parameters keeps its betas, which can only cost Muon.
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
OTHERS = (0.25, 1.0, 4.0)
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
class Candidate:
    """An optimizer and its grid.

    lrs, momenta, others: a first guess at where the best lies; `sweep` goes on beyond either end while the best is at
    it. usual: the momentum that papers and libraries have. build: (model, setting) -> optimizers, stepped in turn.
    """

    title: str
    lrs: tuple[float, ...]
    momenta: tuple[float, ...]
    usual: float
    weight_decays: tuple[float, ...]
    build: Callable[[nn.Module, Setting], list[Optimizer]]
    others: tuple[float, ...] = OTHERS
    second_betas: tuple[float, ...] = (BETAS[1],)

    def grid(self, rates_alone: bool = False) -> Grid:
        """Return what to try first. rates_alone: learning rates, and everything else as usual."""
        if rates_alone:
            usual = {"weight_decay": self.weight_decays[-1], "momentum": self.usual, "others": 1.0}
            return {"lr": self.lrs} | {name: (value,) for name, value in usual.items()} | {"second_beta": (BETAS[1],)}
        return {
            "lr": self.lrs,
            "weight_decay": self.weight_decays,
            "momentum": self.momenta,
            "others": self.others,
            "second_beta": self.second_betas,
        }

    def is_usual(self, setting: Setting) -> bool:
        """Say whether only learning rate, weight decay and second beta of this setting were chosen."""
        return (setting.momentum, setting.others) == (self.usual, 1.0)


def settings(name: str, grid: Mapping[str, Sequence[float]]) -> list[Setting]:
    """Return all settings of a grid."""
    return [Setting(name, **dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]


def widened(grid: Grid, best: Setting) -> Grid:
    """Return the grid with one more value beyond each end at which the best setting stands; a fixed one has no end."""
    return {name: _widened(name, values, getattr(best, name)) for name, values in grid.items()}


def ends(grid: Mapping[str, Sequence[float]], best: Setting) -> list[str]:
    """Return the names of what the best setting has from an end of the grid that could be widened there."""
    return [name for name, values in grid.items() if _widened(name, tuple(values), getattr(best, name)) != values]


def _widened(name: str, values: tuple[float, ...], best: float) -> tuple[float, ...]:
    if name not in ("lr", "momentum", "others") or len(values) == 1:
        return values
    lower, upper = _neighbours(name, best)
    less = (lower,) if best == values[0] and lower is not None else ()
    more = (upper,) if best == values[-1] and upper is not None else ()
    return less + values + more


def _neighbours(name: str, value: float) -> tuple[float | None, float | None]:
    if name == "momentum":
        place = MOMENTA.index(value)
        return (MOMENTA[place - 1] if place else None), (MOMENTA[place + 1] if place + 1 < len(MOMENTA) else None)
    factor = 2 if name == "lr" else 4
    return value / factor, value * factor


def doubling(low: float, count: int) -> tuple[float, ...]:
    """Return `count` learning rates, each twice the one before."""
    return tuple(low * 2**n for n in range(count))


# ---- The three --------------------------------------------------------------------------------------------


def _groups(model: nn.Module, setting: Setting) -> list[dict[str, Any]]:
    params = by_algorithm(model)
    return [
        {"params": params["muon"], "lr": setting.lr},
        {"params": params["adamw"], "lr": setting.lr * setting.others},
    ]


def _sgd(model: nn.Module, setting: Setting) -> list[Optimizer]:
    options: dict[str, Any] = {"momentum": setting.momentum, "nesterov": True, "weight_decay": setting.weight_decay}
    return [SGD(_groups(model, setting), lr=setting.lr, **options)]


def _adamw(model: nn.Module, setting: Setting) -> list[Optimizer]:
    options: dict[str, Any] = {
        "betas": (setting.momentum, setting.second_beta),
        "weight_decay": setting.weight_decay,
    }
    return [AdamW(_groups(model, setting), lr=setting.lr, **options)]


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


def _muon(model: nn.Module, setting: Setting) -> list[Optimizer]:
    return muon_and_adamw(by_algorithm(model), setting)


CANDIDATES: dict[str, Candidate] = {
    "sgd": Candidate("SGD", doubling(0.025, 6), (0.8, 0.9, 0.95), 0.9, (0.0, 0.003), _sgd),
    "adamw": Candidate(
        "AdamW", doubling(0.001, 6), (0.7, 0.8, 0.9), 0.9, (0.0, 0.1), _adamw, second_betas=(0.95, 0.999)
    ),
    "muon": Candidate("Muon", doubling(0.004, 6), (0.8, 0.9, 0.95), 0.95, (0.0, 0.1), _muon),
}


# ---- Variants of Muon -------------------------------------------------------------------------------------

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


def _variant(name: str) -> Candidate:
    """Return a variant over Muon's own grid."""
    title, options = VARIANT_OPTIONS[name]

    def build(model: nn.Module, setting: Setting) -> list[Optimizer]:
        return muon_and_adamw(by_algorithm(model), setting, functools.partial(Muon, **options))

    return replace(CANDIDATES["muon"], title=title, build=build)


VARIANTS = {name: _variant(name) for name in VARIANT_OPTIONS}


def candidate(name: str) -> Candidate:
    """Return who races under this name, one of the three or a variant."""
    return CANDIDATES[name] if name in CANDIDATES else VARIANTS[name]


def title(name: str) -> str:
    """Return how an optimizer is called in tables and pictures."""
    return candidate(name).title
