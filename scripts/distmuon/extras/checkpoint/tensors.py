"""All tensors of a training, by name, as boxes of whole ones: the same names and shapes on every grid.

model/blocks.0.up.weight                         a parameter or a buffer of the model
optimizer/blocks.0.up.weight/momentum_buffer     what its optimizer keeps of it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from distmuon.extras.checkpoint.boxed import ShardView, boxes_of_flat_range, to_global
from distmuon.extras.checkpoint.files import CheckpointError
from distmuon.extras.checkpoint.manifest import DTYPES, MODEL, OPTIMIZER
from distmuon.extras.checkpoint.names import plain_names
from distmuon.optim.muonw_plans import local
from distmuon.optim.sharded_optimizer import ShardedOptimizer
from distmuon.sharding.boxes import all_of
from distmuon.sharding.buffers import Piece, dtype_name
from distmuon.sharding.collectives import Group
from distmuon.sharding.layout import ParamSpec
from distmuon.sharding.meshes import common_mesh, own_box
from distmuon.sharding.tensor_parallel import tp_split_dim

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state returns


class Owned(NamedTuple):
    """A parameter of an optimizer's. name: the model's, without wrappers."""

    name: str
    tensor: Tensor
    group: dict[str, Any]
    optimizer: torch.optim.Optimizer


class LiveTensors:
    """A model and its optimizers, and where this rank's part of every tensor of theirs lies.

    Raises CheckpointError for what could be saved and never loaded, by name, and for what does not belong together.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers) -> None:
        self.model, self.optimizers = model, _as_sequence(optimizer)
        common_mesh(list(model.named_parameters()))  # which refuses parameters that lie on others
        sharded = [each for each in self.optimizers if isinstance(each, ShardedOptimizer)]
        self._tp: Group | None = sharded[0].grid.tp if sharded else None
        self._specs: dict[int, ParamSpec] = {}
        self._pieces: dict[int, Piece] = {}
        for buffers in (each.buffers for each in sharded):
            self._specs |= {id(p): spec for p, spec in zip(buffers.parameters, buffers.layout.specs, strict=True)}
            pieces = (piece for of_bucket in buffers.pieces.values() for piece in of_bucket)
            self._pieces |= {id(buffers.parameters[piece.index]): piece for piece in pieces}
        self.live = self._live_tensors()
        self.boxes = {name: self._of_model(name, value) for name, value in self.live.items()}
        self.owned = list(self._owned())

    def tensors(self) -> dict[str, ShardView]:
        """Return everything that is to be saved, in the memory where it lives."""
        found = {f"{MODEL}/{name}": boxed for name, boxed in self.boxes.items()}
        for owned in self.owned:
            for key, value in self.state_of(owned).items():
                found[f"{OPTIMIZER}/{owned.name}/{key}"] = self.of_state(owned, key, value)
        return found

    def state_of(self, owned: Owned) -> dict[str, Any]:
        """Return what the optimizer keeps of a parameter now; nothing is made for one of which it keeps nothing."""
        return owned.optimizer.state.get(owned.tensor, {})

    def kept_of(self, owned: Owned) -> Tensor | None:
        """Return what this rank keeps of a parameter, as its state has it; None where it owns nothing of it."""
        if not isinstance(owned.optimizer, ShardedOptimizer):
            return owned.tensor
        piece = self.piece_of(owned)
        return None if piece is None else piece.weight

    def piece_of(self, owned: Owned) -> Piece | None:
        """Return the piece of a parameter that a sharded optimizer has left to this rank."""
        return self._pieces.get(id(owned.tensor))

    def of_state(self, owned: Owned, key: str, value: Any) -> ShardView:
        """Return what an optimizer keeps of a parameter as boxes of a whole tensor."""
        what = f"{owned.name}/{key}, of the optimizer"
        _check_can_be_loaded(what, value)
        if isinstance(owned.optimizer, ShardedOptimizer) and value.ndim:
            assert self._tp is not None
            spec, piece = self._specs[id(owned.tensor)], self._pieces[id(owned.tensor)]
            held = boxes_of_flat_range(spec, self._tp.size, self._tp.rank, piece.meta.range_in_param, value)
            return ShardView(spec.full_shape(self._tp.size), value.dtype, held)
        return _placed(what, value)

    def _of_model(self, name: str, value: Tensor) -> ShardView:
        _check_can_be_loaded(name, value)
        if self._tp is None or isinstance(value, DTensor):
            self._refuse_unknown_cut(name, value)
            return _placed(name, value)
        spec = self._specs.get(
            id(value), ParamSpec(name, tuple(value.shape), dtype_name(value.dtype), tp_split_dim(value))
        )
        held = to_global(spec, self._tp.size, self._tp.rank, all_of(value.shape), value.detach())
        return ShardView(spec.full_shape(self._tp.size), value.dtype, held)

    def _refuse_unknown_cut(self, name: str, value: Tensor) -> None:
        ranks = getattr(
            value, "tp_size", torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        )
        if not isinstance(value, DTensor) and tp_split_dim(value) is not None and ranks > 1:
            raise CheckpointError(
                f"{name!r} is cut over TP ranks, and only a sharded optimizer knows the grid: give that, too."
            )

    def _live_tensors(self) -> dict[str, Tensor]:
        """Return the model's state by plain names: the tensors themselves, for loading to write to."""
        modules = (self.model.named_parameters, self.model.named_buffers)
        alive = {id(tensor) for named in modules for _, tensor in named(remove_duplicate=False)}
        found = self.model.state_dict(keep_vars=True)
        for name, value in found.items():
            if name.rpartition(".")[2] == EXTRA_STATE or not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the model keeps {name!r}, a {type(value).__name__}, by get_extra_state or a hook; only its "
                    "parameters and buffers are saved: make it a buffer, or keep it in the notes."
                )
            if id(value) not in alive:
                raise CheckpointError(
                    f"the model's state_dict makes {name!r} anew (by a hook, or FSDP1), so nothing loaded would reach "
                    "the model; remove the hook, or wrap the model with fully_shard."
                )
        names = plain_names(self.model, list(found))
        return {names[name]: value for name, value in found.items()}

    def _owned(self) -> Iterator[Owned]:
        """Yield the optimizers' parameters, under the names that the model has for them."""
        given = dict(self.model.named_parameters())
        plain = plain_names(self.model, list(given))
        names = {id(p): plain[name] for name, p in given.items()}
        seen: set[int] = set()
        for optimizer in self.optimizers:
            for key in optimizer.state:
                if not isinstance(key, Tensor):
                    raise CheckpointError(f"the optimizer keeps {key!r} of no parameter, and that cannot be saved.")
            for group in optimizer.param_groups:
                for p in group["params"]:
                    name = names.get(id(p))
                    if name is None:
                        raise CheckpointError(
                            f"the optimizer has a parameter of shape {tuple(p.shape)} that the model has not; give "
                            "both of one training."
                        )
                    if name not in self.live:
                        raise CheckpointError(f"the model's state_dict leaves {name!r} out, which is trained.")
                    if id(p) in seen:
                        raise CheckpointError(f"{name!r} is in two groups; let one optimizer train it.")
                    seen.add(id(p))
                    yield Owned(name, p, group, optimizer)


def _as_sequence(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    found = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    for each in found:
        if not hasattr(each, "param_groups") or not hasattr(each, "state"):
            raise CheckpointError(f"{type(each).__name__} is no optimizer; give one, several in a list, or none.")
    return found


def _placed(name: str, value: Tensor) -> ShardView:
    """Return a plain tensor, or a DTensor where PyTorch has placed it."""
    box = own_box(name, value) if isinstance(value, DTensor) else all_of(value.shape)
    return ShardView(value.shape, value.dtype, [(box, local(value.detach()))])


def _check_can_be_loaded(name: str, value: Any) -> None:
    """Raise CheckpointError for a tensor that loading could not write to, or could not read."""
    problem = None
    if not isinstance(value, Tensor):
        problem = f"a {type(value).__name__} and no tensor"
    elif is_lazy(value):
        problem = "without a shape yet; let the model run once before"
    elif value.is_meta:
        problem = "on the meta device; give it storage first (to_empty)"
    elif value.layout != torch.strided or value.is_quantized or value.is_nested:
        problem = f"no dense tensor ({value.layout})"
    elif dtype_name(value.dtype) not in DTYPES:
        problem = f"of dtype {value.dtype}"
    elif value.is_inference():
        problem = "an inference tensor, which nothing may write to; clone it outside inference_mode"
    elif any(step == 0 and size > 1 for step, size in zip(local(value).stride(), local(value).shape, strict=True)):
        problem = "expanded, several elements in one place; clone it"
    if problem:
        raise CheckpointError(f"{name!r} is {problem}: a checkpoint cannot keep it.")
