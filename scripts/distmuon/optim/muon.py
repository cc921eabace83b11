"""Muon on one device, and the four pieces of arithmetic that every distributed form reuses unchanged.

    M_t = mu M_{t-1} + G_t                              momentum     (elementwise: works on a flat shard)
    U_t = mu M_t + G_t                                  Nesterov     (elementwise)
    O_t = NewtonSchulz(U_t)                             needs the whole matrix
    W_t = W_{t-1} - lr (scale(A, B) O_t + lambda W_{t-1})   decay, apply (elementwise)

Source: Moonlight (Liu et al. 2025, arXiv 2502.16982), equations 1 to 4; Muon (Jordan et al. 2024). Everything but
Newton–Schulz touches one element at a time, which is why ZeRO-1 can run it on shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distmuon.optim.newton_schulz import batching_pays, newton_schulz_, quintics
from distmuon.optim.routing import check_muon_parameter

MOMENTA = ("sum", "average")
SCALES = ("match_rms", "original")

MUON_DEFAULTS: dict[str, Any] = dict(
    lr=0.02,
    momentum=0.95,
    nesterov=True,
    momentum_kind="sum",
    weight_decay=0.1,
    scale="match_rms",
    ns_steps=5,
    ns_coefficients="muon",
)  # fmt: skip

# ---- The arithmetic ---------------------------------------------------------------------------------------


def momentum_(
    buffer: Tensor,  # M, [...]: a matrix or a flat shard of it; overwritten
    gradient: Tensor,  # G, [...]
    momentum: float,  # mu
    nesterov: bool = True,
    kind: str = "sum",
) -> Tensor:  # U, [...]
    """Update the momentum `buffer` in place; return what Newton–Schulz is fed, a new tensor of the same shape.

    kind: "sum", M <- mu M + G (the paper), or "average", M <- mu M + (1 - mu) G (torch, Jordan's code). With Nesterov
    the second applies the same rule once more. The two differ by the factor 1 - mu, which Newton–Schulz divides out.
    """
    if kind == "average":
        # M_t = mu M_{t-1} + (1 - mu) G_t;  U_t = mu M_t + (1 - mu) G_t
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if nesterov else buffer.clone()
    # M_t = mu M_{t-1} + G_t;  U_t = mu M_t + G_t
    buffer.mul_(momentum).add_(gradient)
    return gradient.add(buffer, alpha=momentum) if nesterov else buffer.clone()


def scale(shape: Sequence[int], kind: str = "match_rms") -> float:
    """Return the factor on the orthogonalized update of a matrix of the *full* shape [A, B].

    "match_rms": 0.2 sqrt(max(A, B)); a semi-orthogonal [A, B] has RMS 1/sqrt(max(A, B)) (Moonlight, Lemma 1), so the
    update's RMS becomes 0.2, about AdamW's, whose learning rate and decay can then be reused.
    "original": sqrt(max(1, A / B)) (Jordan et al. 2024).
    """
    a, b = shape
    if kind == "match_rms":
        # 0.2 sqrt(max(A, B))
        return 0.2 * math.sqrt(max(a, b))
    # sqrt(max(1, A / B))
    return math.sqrt(max(1.0, a / b)) if b else 1.0


def decay_(
    weight: Tensor,  # W, [...]; overwritten
    lr: float,
    weight_decay: float,  # lambda
) -> None:
    """Take decoupled weight decay in place."""
    # W <- (1 - lr lambda) W
    weight.mul_(1 - lr * weight_decay)


def apply_(
    weight: Tensor,  # W, [...]; overwritten
    update: Tensor,  # O, [...], of any dtype
    lr: float,
    factor: float,  # scale(A, B)
) -> None:
    """Take the step in place, in the dtype of `weight`."""
    # W <- W - lr scale(A, B) O
    weight.add_(update.to(weight.dtype), alpha=-lr * factor)


def orthogonalize(
    inputs: Sequence[Tensor],  # n matrices [A, B]
    group: dict[str, Any],
    compute_dtype: torch.dtype | str = "auto",
) -> Sequence[Tensor]:  # n matrices [A, B]
    """Run Newton–Schulz on whole matrices [A, B] of one shape, under one group's `ns_steps` and `ns_coefficients`.

    The inputs are used up: a matrix that comes alone is overwritten by its result.
    """
    stack = torch.stack(list(inputs)) if len(inputs) > 1 else inputs[0].unsqueeze(0)  # [n, A, B]
    return newton_schulz_(stack, group["ns_steps"], group["ns_coefficients"], compute_dtype).unbind()


def batches(matrices: Sequence[Tensor], groups: Sequence[dict[str, Any]], batched: bool = True) -> list[list[int]]:
    """Return which matrices to orthogonalize together: small ones of equal shape under equal options.

    groups: the parameter group of each matrix.
    batched: False keeps every matrix alone, which is what a bitwise comparison needs: a batched product may be summed
        in another order than a single one.
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for index, (matrix, group) in enumerate(zip(matrices, groups, strict=True)):
        alike = (matrix.shape, matrix.dtype, matrix.device, group["ns_steps"], str(group["ns_coefficients"]))
        found.setdefault(alike if batched and batching_pays(matrix) else (index,), []).append(index)
    return list(found.values())


def check_muon_options(group: dict[str, Any]) -> None:
    """Raise ValueError, naming the value and what is allowed, for options that Muon does not have."""
    if group["momentum_kind"] not in MOMENTA:
        raise ValueError(f"momentum_kind is {group['momentum_kind']!r}; choose one of {', '.join(MOMENTA)}.")
    if group["scale"] not in SCALES:
        raise ValueError(f"scale is {group['scale']!r}; choose one of {', '.join(SCALES)}.")
    if not group["lr"] >= 0 or not group["weight_decay"] >= 0 or not 0 <= group["momentum"] < 1:
        raise ValueError(
            f"lr={group['lr']}, weight_decay={group['weight_decay']}, momentum={group['momentum']}: "
            "lr and weight_decay must be 0 or more, momentum in [0, 1)."
        )
    quintics(group["ns_coefficients"], group["ns_steps"])


# ---- The single-device optimizer --------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Muon for whole matrices on one device. Other parameters belong to `torch.optim.AdamW`.

    params: as for any torch optimizer; every parameter is a matrix [A, B].
    lr, momentum, nesterov, momentum_kind, weight_decay, scale, ns_steps, ns_coefficients: per group; see the
        functions above.
    input_dtype: round what Newton–Schulz is fed to this dtype first; None keeps it. A distributed run gathers the
        momentum in bf16, so the reference it is held against must round in the same place.
    compute_dtype, batched: see `newton_schulz` and `orthogonalize`.
    """

    def __init__(
        self,
        params: Any,
        *,
        input_dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | str = "auto",
        batched: bool = True,
        **options: Any,
    ) -> None:
        if unknown := set(options) - set(MUON_DEFAULTS):
            raise TypeError(f"unknown option(s) {sorted(unknown)}; Muon has {', '.join(MUON_DEFAULTS)}.")
        super().__init__(params, MUON_DEFAULTS | options)
        self.input_dtype, self.compute_dtype, self.batched = input_dtype, compute_dtype, batched

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, refusing parameters and options that Muon cannot take; torch calls it for every group."""
        super().add_param_group(param_group)
        check_muon_options(param_group)
        names = param_group.get("param_names") or [f"#{i}" for i in range(len(param_group["params"]))]
        for name, parameter in zip(names, param_group["params"], strict=True):
            check_muon_parameter(name, parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        parameters, groups = [p for p, _ in moving], [group for _, group in moving]
        for batch in batches(parameters, groups, self.batched):
            self._move([parameters[i] for i in batch], [groups[i] for i in batch])
        return loss

    def _move(self, parameters: list[Tensor], groups: list[dict[str, Any]]) -> None:
        """Update the matrices of one batch, and free what that took."""
        inputs = [self._momentum(p, group) for p, group in zip(parameters, groups, strict=True)]
        updates = orthogonalize(inputs, groups[0], self.compute_dtype)
        for p, group, update in zip(parameters, groups, updates, strict=True):
            decay_(p, group["lr"], group["weight_decay"])
            apply_(p, update, group["lr"], scale(p.shape, group["scale"]))

    def _momentum(
        self,
        p: Tensor,  # [A, B]
        group: dict[str, Any],
    ) -> Tensor:  # U, [A, B]
        """Update the momentum of `p`; return what Newton–Schulz is fed."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"]
        u = momentum_(buffer, p.grad, group["momentum"], group["nesterov"], group["momentum_kind"])
        return u if self.input_dtype is None else u.to(self.input_dtype)
