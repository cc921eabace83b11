"""All tensors of a training, by name, as boxes of whole ones: the same names and shapes on every grid.

model/blocks.0.up.weight                         a parameter or a buffer of the model
optimizer/blocks.0.up.weight/momentum_buffer     what its optimizer keeps of it
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distmuon.checkpoint.boxed import Boxed, in_whole, of_run
from distmuon.checkpoint.storage import CheckpointError
from distmuon.muonw.boxes import all_of
from distmuon.muonw.meshes import common_mesh, own_box
from distmuon.muonw.plans import local
from distmuon.optim.masters import MasterWeights, lacks_masters
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.optim.states import MASTER_WEIGHT
from distmuon.sharding.buffers import dtype_name
from distmuon.sharding.layout import ParamSpec
from distmuon.sharding.tensor_parallel import tp_split_dim

MODEL, OPTIMIZER = "model", "optimizer"


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Boxed]:
    """Return everything that is to be saved, or loaded, in the memory where it lives.

    Raises CheckpointError for a parameter of the optimizer's that the model does not have, and for what is no tensor.
    """
    made, found = _kind_of(model, optimizer), {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model keeps {name!r}, a {type(value).__name__}; only tensors are saved.")
        found[f"{MODEL}/{name}"] = made.of_model(name, value)
    for name, p in owned(model, optimizer):
        for key, value in optimizer.state[p].items() if p in optimizer.state else ():
            found[f"{OPTIMIZER}/{name}/{key}"] = made.of_state(p, key, value)
    return found


def make_states(model: nn.Module, optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Let the optimizer have just those states, of any values, that are saved under these names."""
    made = _kind_of(model, optimizer)
    _check_masters(model, optimizer, names)
    for name, p in owned(model, optimizer):
        begin = f"{OPTIMIZER}/{name}/"
        keys = [found.removeprefix(begin) for found in names if found.startswith(begin)]
        if (like := made.kept_of(p)) is None:
            continue
        state = optimizer.state[p]
        for key in [key for key in state if key not in keys]:
            del state[key]
        for key in keys:
            if key not in state:
                dtype = optimizer.kept_dtype(p) if isinstance(optimizer, MasterWeights) else like.dtype
                state[key] = torch.zeros(()) if key == "step" else torch.zeros_like(like, dtype=dtype)


def _check_masters(model: nn.Module, optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Refuse saved masters where they would be rounded; warn where there are none, and they are wanted."""
    lacking = []
    for name, p in owned(model, optimizer) if isinstance(optimizer, MasterWeights) else ():
        begin = f"{OPTIMIZER}/{name}/"
        saved, wanted = begin + MASTER_WEIGHT in names, optimizer.keeps_master(p)  # type: ignore[attr-defined]
        if saved and not wanted:
            raise CheckpointError(
                f"the checkpoint has a {MASTER_WEIGHT} of {name!r}, which is {p.dtype} here and keeps none; make the "
                "optimizer with master_weights=True, and the model as it was."
            )
        if wanted and not saved and any(found.startswith(begin) for found in names):
            lacking.append(name)
    if lacking:
        warnings.warn(lacks_masters("checkpoint", lacking), stacklevel=4)


def owned(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's parameters, under the names that the model has for them."""
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise CheckpointError(
                    f"the optimizer has a parameter of shape {tuple(p.shape)} that the model has not; give both of one "
                    "training."
                )
            yield names[id(p)], p


def _kind_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> _Flat | _Placed:
    return _Flat(optimizer) if isinstance(optimizer, ShardedOptimizer) else _Placed(model)


class _Placed:
    """Plain tensors, and DTensors where PyTorch has placed them."""

    def __init__(self, model: nn.Module) -> None:
        common_mesh(list(model.named_parameters()))  # which refuses parameters that lie on others

    def kept_of(self, p: Tensor) -> Tensor:
        """Return what this rank keeps of a parameter, as its state has it."""
        return p

    def of_model(self, name: str, value: Tensor) -> Boxed:
        box = own_box(name, value) if isinstance(value, DTensor) else all_of(value.shape)
        return Boxed(value.shape, value.dtype, [(box, local(value.detach()))])

    def of_state(self, p: Tensor, key: str, value: Any) -> Boxed:
        return self.of_model(key, value)


class _Flat:
    """TP-local parameters, and the flat runs of them that ZeRO-1 has left to this rank."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.tp, buffers = optimizer.grid.tp, optimizer.buffers
        self.specs = {id(p): spec for p, spec in zip(buffers.parameters, buffers.layout.specs, strict=True)}
        self.pieces = {id(buffers.parameters[p.index]): p for pieces in buffers.pieces.values() for p in pieces}

    def kept_of(self, p: Tensor) -> Tensor | None:
        """Return what this rank keeps of a parameter, as its state has it; None where it owns nothing of it."""
        piece = self.pieces.get(id(p))
        return None if piece is None else piece.weight

    def of_model(self, name: str, value: Tensor) -> Boxed:
        spec = self.specs.get(
            id(value), ParamSpec(name, tuple(value.shape), dtype_name(value.dtype), tp_split_dim(value))
        )
        shape = spec.full_shape(self.tp.size)
        return Boxed(
            shape, value.dtype, in_whole(spec, self.tp.size, self.tp.rank, all_of(value.shape), value.detach())
        )

    def of_state(self, p: Tensor, key: str, value: Tensor) -> Boxed:
        if value.ndim == 0:
            return Boxed((), value.dtype, [((), value)])
        spec = self.specs[id(p)]
        run = self.pieces[id(p)].meta.range_in_param
        held = of_run(spec, self.tp.size, self.tp.rank, run, value)
        return Boxed(spec.full_shape(self.tp.size), value.dtype, held)
