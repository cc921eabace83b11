"""AdamW for a few tensors of a group: torch's own arithmetic, on whatever pieces of parameters a rank holds.

Source: Loshchilov and Hutter 2019; `torch.optim.adamw`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from distmuon.optim.masters import rounded_once
from distmuon.sharding.precision import is_narrow


def begin(state: dict[str, Any], like: Tensor, dtype: torch.dtype | None = None) -> None:
    """Let a state have what AdamW keeps of a tensor, if this is its first step."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(like, dtype=dtype) for _ in range(2))


def adamw_(
    group: Mapping[str, Any],
    weights: Sequence[Tensor],  # W, [...] each; overwritten
    gradients: Sequence[Tensor],  # G, as the weights
    states: Sequence[Mapping[str, Tensor]],  # step, exp_avg, exp_avg_sq of each; overwritten
) -> None:
    """Take a step in place, under one group's options. What is narrower than float32 is rounded once, at the end."""
    narrow = [i for i, weight in enumerate(weights) if is_narrow(weight)]
    for i in narrow:  # one by one, for the sake of memory
        average, square = states[i]["exp_avg"], states[i]["exp_avg_sq"]
        with rounded_once(weights[i]) as weight, rounded_once(average) as wide, rounded_once(square) as wide_square:
            state = {"step": states[i]["step"], "exp_avg": wide, "exp_avg_sq": wide_square}
            _adamw(group, [weight], [gradients[i].float()], [state])
    if others := [i for i in range(len(weights)) if i not in narrow]:
        _adamw(group, [weights[i] for i in others], [gradients[i] for i in others], [states[i] for i in others])


def _adamw(
    group: Mapping[str, Any],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        params=list(weights),
        grads=list(gradients),
        exp_avgs=[state["exp_avg"] for state in states],
        exp_avg_sqs=[state["exp_avg_sq"] for state in states],
        max_exp_avg_sqs=[],
        state_steps=[state["step"] for state in states],
        amsgrad=False,
        beta1=group.get("momentum", beta1),  # where a scheduler cycles the momentum of all groups
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
