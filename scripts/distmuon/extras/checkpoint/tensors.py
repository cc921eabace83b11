"""All tensors of a training, by name, as boxes of whole ones: the same names and shapes on every grid.

model/blocks.0.up.weight                         a parameter or a buffer of the model
optimizer/blocks.0.up.weight/momentum_buffer     what its optimizer keeps of it

Beside them stands, of every group of the optimizer's, what it was trained by and with which options.

A DTensor's shard, a TP-local block and ZeRO-1's flat run of a block all become boxes of one tensor (see
`local_views`), so that a state which one grid has saved is loaded by any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from distmuon.extras.checkpoint.files import CheckpointError
from distmuon.extras.checkpoint.manifest import DTYPES, MODEL, OPTIMIZER
from distmuon.optim.masters import local_views
from distmuon.optim.states import MASTER_WEIGHT, PARALLEL, ROW_MOMENTS, WRAPPERS, CheckedState
from distmuon.sharding.boxes import Box, extent, volume
from distmuon.sharding.buffers import dtype_name
from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import ParamSpec
from distmuon.sharding.local_views import Boxes, LocalView, at, boxes_in_place, everything, local, over_tp
from distmuon.sharding.meshes import common_mesh
from distmuon.sharding.tensor_parallel import tp_split_dim

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
NO_OPTIONS = ("params", "param_names")
EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state returns


class ShardView(Tensor):
    """A global tensor, and this rank's boxes of it with their values, in memory that loading writes to.

    It speaks the protocol (`_Checkpointable`) by which torch.distributed.checkpoint asks a DTensor which chunks of a
    global tensor it has, wherever they come from. It has no values of its own: nothing can be computed with it.
    """

    held: dict[tuple[int, ...], tuple[Box, Tensor]]  # by where each box begins

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, held: Sequence[tuple[Box, Tensor]]) -> ShardView:
        made = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)  # type: ignore[attr-defined]
        made.held = {tuple(side.start for side in box): (box, value) for box, value in held if volume(box)}
        return made

    def blank(self, dtype: torch.dtype) -> ShardView:
        """Return the same boxes with memory of their own, in the host, yet to be filled."""
        held = [(box, torch.empty_like(value, dtype=dtype, device="cpu")) for box, value in self.held.values()]
        return ShardView(self.shape, dtype, held)

    def copy_from(self, other: ShardView) -> None:
        """Take the values of the same boxes, into the memory of these."""
        for begin, (_, value) in self.held.items():
            value.copy_(other.held[begin][1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a ShardView tensor: it only says where its values lie.")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        size = self.size()
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(extent(box)))
            for offsets, (box, _) in self.held.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.held[tuple(index.offset)][1]


class Owned(NamedTuple):
    """A parameter of an optimizer's. name: the model's, without wrappers."""

    name: str
    view: LocalView
    group: dict[str, Any]
    optimizer: torch.optim.Optimizer

    @property
    def tensor(self) -> Tensor:
        return self.view.parameter

    @property
    def algorithm(self) -> str:
        return algorithm_of(self.optimizer, self.group)

    @property
    def made_by(self) -> str:
        return name_of(self.optimizer)

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer keeps of it now; nothing is made where it keeps nothing."""
        return self.optimizer.state.get(self.view.parameter, {})

    def replace_state(self, state: Mapping[str, Any]) -> None:
        kept = self.optimizer.state[self.view.parameter]
        kept.clear()
        kept.update(state)

    def check_master(self) -> None:
        """Raise CheckpointError for master weights that nobody would save."""
        values = self.view.values
        if values is not None and values.dtype != self.tensor.dtype and MASTER_WEIGHT not in self.state:
            raise CheckpointError(
                f"the values of {self.name!r} are {values.dtype}, wider than the parameter, and not in the state of "
                f"{type(self.optimizer).__name__}, so they would be lost; keep them there as {MASTER_WEIGHT!r}."
            )

    def shard_view(self, key: str, value: Any) -> ShardView:
        """Return what the optimizer keeps under `key` as boxes of a whole tensor."""
        what = f"{self.name}/{key}, of the optimizer"
        _check_can_be_loaded(what, value)
        if key == ROW_MOMENTS and self.view.rows:
            return _shard_view(value, (self.view.rows,), self.view.row_boxes)
        if not isinstance(value, DTensor) and self.view.values is not None and value.shape == self.view.values.shape:
            return _shard_view(value, self.view.shape, self.view.boxes)
        if value.ndim and not (isinstance(value, DTensor) or self.view.is_whole):
            raise CheckpointError(
                f"{what!r} has shape {list(value.shape)}, which is not that of the values that local_views() names: "
                "nothing says which part of a whole it is, so it cannot be saved."
            )
        return _shard_view(value, value.shape, boxes_in_place(what, value))


def algorithm_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return by what a group is trained: an algorithm that several optimizers run, or the name of the class."""
    if isinstance(optimizer, CheckedState):  # ours: of a stranger's "muon" nobody knows what it keeps
        return group.get("algorithm", "muon")
    if type(optimizer) is torch.optim.AdamW and not group["amsgrad"] and not group["maximize"]:
        return "adamw"
    return name_of(optimizer)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return what an optimizer is called in a checkpoint and in sentences."""
    if isinstance(optimizer, CheckedState):
        return optimizer.MADE_BY
    made_by = type(optimizer)
    return f"torch.optim.{made_by.__name__}" if made_by.__module__.startswith("torch.optim") else made_by.__name__


def steps_of(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the updates that an optimizer has made, where they are kept beside its state; no local view has them."""
    return optimizer.steps if isinstance(optimizer, CheckedState) else None  # what a stranger calls so may be another


class LiveTensors:
    """A model and its optimizers, and where this rank's part of every tensor of theirs lies.

    Raises CheckpointError for what could be saved and never loaded, by name, and for what does not belong together.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers) -> None:
        self.model, self.optimizers = model, _as_sequence(optimizer)
        common_mesh(list(model.named_parameters()))  # which refuses parameters that lie on others
        grids = [grid for each in self.optimizers if isinstance(grid := getattr(each, "grid", None), Grid)]
        self._tp = grids[0].tp if grids else None
        self._views = {id(view.parameter): view for each in self.optimizers for view in local_views(each)}
        self.live = self._live_tensors()
        self.boxes = {name: self._of_model(name, value) for name, value in self.live.items()}
        self.owned = list(self._owned())

    def tensors(self) -> dict[str, ShardView]:
        """Return everything that is to be saved, in the memory where it lives."""
        found = {f"{MODEL}/{name}": boxed for name, boxed in self.boxes.items()}
        for owned in self.owned:
            owned.check_master()
            for key, value in owned.state.items():
                found[f"{OPTIMIZER}/{owned.name}/{key}"] = owned.shard_view(key, value)
        return found

    def groups(self) -> list[dict[str, Any]]:
        """Return, of every group, its parameters' names, options, and what trained it, as JSON holds them."""
        names = {id(owned.tensor): owned.name for owned in self.owned}
        return [
            {
                "parameters": [names[id(p)] for p in group["params"]],
                "options": {name: _plain(name, value) for name, value in group.items() if name not in NO_OPTIONS},
                "algorithm": algorithm_of(optimizer, group),
                "made_by": name_of(optimizer),
                "steps": steps_of(optimizer),
            }
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    def _of_model(self, name: str, value: Tensor) -> ShardView:
        _check_can_be_loaded(name, value)
        view = self._views.get(id(value))
        if self._tp is None and (view is None or view.shape == value.shape):
            ranks = getattr(value, "tp_size", dist.get_world_size() if dist.is_initialized() else 1)
            if not isinstance(value, DTensor) and tp_split_dim(value) is not None and ranks > 1:
                raise CheckpointError(
                    f"{name!r} is cut over TP ranks, and only a sharded optimizer knows the grid: give that, too."
                )
        if view is not None:
            return _shard_view(value, view.shape, view.held)
        if self._tp is None or isinstance(value, DTensor):
            return _shard_view(value, value.shape, boxes_in_place(name, value))
        spec = ParamSpec(name, tuple(value.shape), dtype_name(value.dtype), tp_split_dim(value))
        held = over_tp(everything(value.shape), spec, self._tp.size, self._tp.rank)
        return _shard_view(value, spec.full_shape(self._tp.size), held)

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
                    if id(p) not in self._views:
                        raise CheckpointError(
                            f"local_views() of {type(optimizer).__name__} leaves out {name!r}; let it return a view of "
                            "each parameter, with values=None where this rank keeps nothing."
                        )
                    yield Owned(name, self._views[id(p)], group, optimizer)


def plain_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return {name that the model gives: name without what wrappers add}, the same for a plain and a wrapped model.

    blocks.0.up.weight is _orig_mod.blocks.0.up.weight in torch.compile, module.blocks.0.up.weight in
    DistributedDataParallel. Raises ValueError where two would become one.
    """
    parallel = {
        f"{at}.{PARALLEL}".removeprefix(".")
        for at, module in model.named_modules()
        if isinstance(module, DataParallel | DistributedDataParallel)
    }
    found = {}
    for name in names:
        parts = name.split(".")
        paths = itertools.accumulate(parts, "{}.{}".format)
        found[name] = ".".join(
            part for part, path in zip(parts, paths, strict=True) if part not in WRAPPERS and path not in parallel
        )
    if len(set(found.values())) < len(found):
        double = next(name for name in found.values() if list(found.values()).count(name) > 1)
        raise ValueError(f"two tensors of the model are called {double!r} without their wrappers; rename a module.")
    return found


def _as_sequence(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    found = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    for each in found:
        if not hasattr(each, "param_groups") or not hasattr(each, "state"):
            raise CheckpointError(f"{type(each).__name__} is no optimizer; give one, several in a list, or none.")
    return found


def _plain(name: str, value: Any) -> Any:
    """Return an option as JSON holds it. Raises CheckpointError, naming it, where it cannot."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"the option {name} is {value!r}, which JSON does not hold; leave it out of the group.")


def _shard_view(value: Tensor, shape: Sequence[int], boxes: Boxes) -> ShardView:
    return ShardView(shape, value.dtype, at(boxes, local(value.detach())))


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
