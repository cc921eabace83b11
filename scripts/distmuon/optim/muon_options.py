"""Options of Muon and AdamW: their defaults, and what is refused of them and of the parameters that Muon is for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from distmuon.optim.adamw import ADAMW_DEFAULTS, check_adamw_options
from distmuon.optim.newton_schulz import COMPUTE_DTYPES, check_form, quintics
from distmuon.optim.options import check_one_number
from distmuon.optim.param_groups import check_muon_parameter, named
from distmuon.sharding.matrices import check_matrices

MomentumKind = Literal["sum", "average"]
ScaleKind = Literal["match_rms", "original"]
MOMENTA, SCALES = get_args(MomentumKind), get_args(ScaleKind)
MOMENTUM_DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # hold a momentum of any size; float16 ends at 65504

MUON_DEFAULTS: dict[str, Any] = dict(
    lr=1e-3,
    momentum=0.95,
    nesterov=True,
    momentum_kind="sum",
    weight_decay=0.1,
    scale="match_rms",
    ns_steps=5,
    ns_coefficients="muon",
    compute_dtype="auto",
    ns_form="auto",
    ns_norm="safe",
    batched=True,
    matrices="whole",
)  # fmt: skip

OPTIONS = {"muon": MUON_DEFAULTS, "adamw": ADAMW_DEFAULTS}  # by algorithm

# the options that `newton_schulz` takes, in its order
NS_OPTIONS = ("ns_steps", "ns_coefficients", "compute_dtype", "ns_form", "ns_norm")


def check_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError, naming it, for an option that a group's algorithm does not have."""
    CHECKS[group["algorithm"]](group)


def check_muon_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the value and what is allowed, for options that Muon does not have."""
    if group["momentum_kind"] not in MOMENTA:
        raise ValueError(f"momentum_kind is {group['momentum_kind']!r}; choose one of {', '.join(MOMENTA)}.")
    if group["scale"] not in SCALES:
        raise ValueError(f"scale is {group['scale']!r}; choose one of {', '.join(SCALES)}.")
    check_one_number("lr", group["lr"])
    if not all(0 <= group[name] < math.inf for name in ("lr", "weight_decay")) or not 0 <= group["momentum"] < 1:
        raise ValueError(
            f"lr={group['lr']}, weight_decay={group['weight_decay']}, momentum={group['momentum']}: "
            "lr and weight_decay must be 0 or more, and finite, momentum in [0, 1)."
        )
    check_matrices(group["matrices"])
    quintics(group["ns_coefficients"], group["ns_steps"])
    check_dtype("compute_dtype", group["compute_dtype"], "auto", COMPUTE_DTYPES)
    check_form(group["ns_form"], group["ns_norm"], group["compute_dtype"])


CHECKS = {"muon": check_muon_options, "adamw": check_adamw_options}


def check_muon_parameters(group: Mapping[str, Any], known: Mapping[Tensor, Any] | None = None) -> None:
    """Raise ValueError, naming it, for a whole parameter of a group that Muon cannot take; warn of what it should not.

    known: the states of a training that has begun. What has one was checked before, and nothing is warned of again.
    """
    for name, parameter in named(group):
        if known is not None and parameter in known:
            continue
        check_muon_parameter(name, parameter, group["matrices"], warn=known is None)
        if parameter.dtype not in MOMENTUM_DTYPES:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}, which holds no momentum (it ends at 65504); "
                "train it in bfloat16 or float32, and let torch.autocast compute in float16."
            )


def check_dtype(name: str, dtype: Any, default: Any, allowed: Sequence[torch.dtype] = MOMENTUM_DTYPES) -> None:
    """Raise TypeError, naming what is allowed, if the option `name` is neither its default nor such a dtype."""
    if dtype != default and dtype not in allowed:
        raise TypeError(f"{name} is {dtype!r}; give {default!r} or one of {', '.join(map(str, allowed))}.")
