"""Tensor parallelism: linear layers cut over the TP group, on plain tensors, with their collectives in plain sight.

    column parallel   Y[I, J_tp]      = X[I, K]    W[J_tp, K]^T     forward: none            backward: all-reduce of dX
    row parallel      Y[I, J]{U_tp}   = X[I, K_tp] W[J, K_tp]^T     forward: all-reduce of Y  backward: none

Put one after the other they need one all-reduce in each direction. Source: Megatron-LM (Shoeybi et al. 2019, section
3). torch's `parallelize_module` does the same with DTensor weights, and hides the collectives that this book counts.

Every parameter carries a mark, `tp_split_dim`: the dimension cut over TP, or None where all TP ranks hold the same
values; those of a layer also `tp_size`, T. Marks are plain attributes; `copy.deepcopy` of a parameter and `to_empty`
lose them, and then the optimizer refuses the model. (A copied layer shares its process group.)
Weights are [out, in], as in `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon.sharding.collectives import Group


class CopyToTP(torch.autograd.Function):
    """Identity forward; backward, the sum over TP of what each rank's slice sends back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, label: str) -> Tensor:
        ctx.group, ctx.label = group, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        summed = ctx.group.all_reduce(gradients[0].contiguous().clone(), ctx.label)
        return summed, None, None


class SumOverTP(torch.autograd.Function):
    """The sum over TP of each rank's partial result forward; identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, label: str) -> Tensor:
        return group.all_reduce(x.contiguous().clone(), label)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _SplitLinear(nn.Linear):  # so that, with T = 1 here, torch's `parallelize_module` may cut it
    split_dim: int

    def __init__(self, inputs: int, outputs: int, group: Group, bias: bool = True, name: str = "linear") -> None:
        shape = [outputs, inputs]
        if shape[self.split_dim] % group.size:
            side = "outputs" if self.split_dim == 0 else "inputs"
            raise ValueError(
                f"{name}: {shape[self.split_dim]} {side} cannot be split evenly over {group.size} TP ranks; "
                "choose a width that T divides."
            )
        shape[self.split_dim] //= group.size
        super().__init__(shape[1], shape[0], bias=bias)
        self.group, self.name = group, name
        for leaf, parameter in self.named_parameters():
            mark(parameter, None if leaf == "bias" and self.split_dim == 1 else self.split_dim)
            parameter.tp_size = group.size  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Begin with zeros: whole weights are drawn for all TP ranks alike, and loaded."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class ColumnParallelLinear(_SplitLinear):
    """[..., in] -> [..., out / T]: each rank computes its own outputs from the whole input.

    Layers that share an input, such as query, key and value, share its copy too: `x = layer.copy_in(x)` once, then
    `layer(x, copied=True)`, so that their gradients are summed locally and all-reduced once.
    """

    split_dim = 0

    def copy_in(self, x: Tensor) -> Tensor:
        return CopyToTP.apply(x, self.group, self.name)

    def forward(
        self,
        x: Tensor,  # [..., in]
        copied: bool = False,
    ) -> Tensor:  # [..., out / T]
        return F.linear(x if copied else self.copy_in(x), self.weight, self.bias)


class RowParallelLinear(_SplitLinear):
    """[..., in / T] -> [..., out]: each rank adds its inputs' share; the bias is added once, after the sum."""

    split_dim = 1

    def forward(
        self,
        x: Tensor,  # [..., in / T]
    ) -> Tensor:  # [..., out]
        y = SumOverTP.apply(F.linear(x, self.weight), self.group, self.name)
        return y if self.bias is None else y + self.bias


def mark(parameter: nn.Parameter, tp_split_dim: int | None) -> nn.Parameter:
    """Note on the parameter along which dimension it is cut over TP (None: not at all), and return it."""
    if tp_split_dim is not None and not 0 <= tp_split_dim < parameter.ndim:
        raise ValueError(
            f"tp_split_dim is {tp_split_dim}, but the parameter has dimensions 0 to {parameter.ndim - 1}; "
            "give one of them, or None where every TP rank holds the whole."
        )
    parameter.tp_split_dim = tp_split_dim  # type: ignore[attr-defined]
    return parameter


def mark_replicated(model: nn.Module) -> None:
    """Mark every parameter that bears no mark yet as whole on every TP rank: embeddings, norms, heads."""
    for parameter in model.parameters():
        if not hasattr(parameter, "tp_split_dim"):
            mark(parameter, None)


def tp_split_dim(parameter: Tensor) -> int | None:
    """Return the dimension that is cut over TP; None where every TP rank holds the whole parameter."""
    return getattr(parameter, "tp_split_dim", None)


def load_slices(
    model: nn.Module,
    full: Mapping[str, Tensor],  # name -> W[I, J]
    group: Group,
) -> None:
    """Fill a TP-local model from whole parameters: this rank's slice of each."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole, dim = full[name], tp_split_dim(parameter)
            parameter.copy_(whole if dim is None else whole.chunk(group.size, dim)[group.rank])


def whole_parameters(model: nn.Module, group: Group) -> dict[str, Tensor]:  # name -> W[I, J]
    """Return copies of the model's whole parameters, gathered over TP: the opposite arrow of `load_slices`."""
    whole = {}
    for name, parameter in model.named_parameters():
        dim, value = tp_split_dim(parameter), parameter.detach()
        whole[name] = value.clone() if dim is None else group.all_gather_blocks(value, dim, f"inspect, {name}").clone()
    return whole
