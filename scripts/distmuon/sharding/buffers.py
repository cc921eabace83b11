"""ZeRO-1: parameters and gradients live in flat buffers, and each rank updates one of D equal shards of them.

One step, for every bucket: reduce-scatter the gradients (each DP rank gets the mean of its shard), update the shard's
fp32 master weights, all-gather the parameters. Together the two collectives move what data parallelism's single
all-reduce moves, and the optimizer's state is D times smaller. Source: ZeRO (Rajbhandari et al. 2020, section 5.1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distmuon.sharding.grid import Grid
from distmuon.sharding.layout import Bucket, DistMeta, Layout, ParamSpec, plan
from distmuon.sharding.warning import warn_of_formats

_numbers = itertools.count()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the layout's name of a torch dtype: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def specs_of(named_parameters: Sequence[tuple[str, Tensor]]) -> list[ParamSpec]:
    """Return what the layout needs to know; a tensor-parallel layer has left `tp_split_dim` on its parameters."""
    return [
        ParamSpec(name, tuple(p.shape), dtype_name(p.dtype), getattr(p, "tp_split_dim", None))
        for name, p in named_parameters
    ]


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank owns, as flat views.

    n = meta.local_range.size elements long. index: the parameter's place in the map.
    """

    index: int
    meta: DistMeta
    weight: Tensor  # [n] of the master weights, float32 or wider
    gradient: Tensor  # [n] of the reduced gradients, same dtype


class ShardedBuffers:
    """The flat storages of one rank, laid out by the virtual map.

    Every parameter and every gradient has its home there: a tensor of the parameter's shape in the flat storage's
    memory, so that collectives read and write it in place. Gradients are float32 (or wider), also those of a bf16
    model, and are added up in that dtype. Master weights are this rank's shard in the same dtype; where the model is
    in it already, they *are* the rank's part of the parameters and cost nothing.

    named_parameters: TP-local, in the order of the map. They move into their homes; whoever had them before, loses
    them: `rebind_if_moved` tells. One in shared memory stays there, because other processes may look at it: its home
    then is a copy, which `rebind_if_moved` and `record_versions` keep equal to it. planner: makes the map of (specs, D,
    bucket_size).
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        grid: Grid,
        bucket_size: int,
        planner: Callable[[Sequence[ParamSpec], int, int], Layout] = plan,
    ) -> None:
        self.grid = grid
        self.names = [name for name, _ in named_parameters]
        self.parameters = [p for _, p in named_parameters]
        self.layout = planner(specs_of(named_parameters), grid.dp.size, bucket_size)
        self.metas = self.layout.view(grid.dp.rank)
        self.flat_parameters = [self._storage(b.size, b.param_dtype) for b in self.layout.buffers]  # each [size]
        self.flat_gradients = [self._storage(b.size, b.grad_dtype) for b in self.layout.buffers]  # each [size]
        self.parameter_homes = [_home(self.flat_parameters, meta) for meta in self.metas]  # each W[I_tp, J]
        self.gradient_homes = [_home(self.flat_gradients, meta) for meta in self.metas]  # each G[I_tp, J]{U_dp}
        self._addresses = [home.data_ptr() for home in (*self.parameter_homes, *self.gradient_homes)]
        self._number = next(_numbers)
        self._shared: set[int] = set()  # indices of the parameters that stay in shared memory
        self._warned_of_formats = False
        self._warn_of_formats(range(len(self.parameters)))
        for index, p in enumerate(self.parameters):
            p.sharded_by = self._number  # type: ignore[attr-defined]
            self._take_in(index)
        self._marks = [dict(vars(p)) for p in self.parameters]
        self.record_versions()
        self.masters = {bucket: self._master(bucket) for bucket in self.layout.buckets}  # each [shard_size]
        self.pieces = {bucket: self._pieces(bucket) for bucket in self.layout.buckets}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.layout.buckets

    def gradients_of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return the bucket's flat gradients [padded], and the view of them that is this rank's shard [shard_size]."""
        return self._whole_and_shard(self.flat_gradients, bucket)

    def parameters_of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return the bucket's flat parameters [padded], and the view of them that is this rank's shard [shard_size]."""
        return self._whole_and_shard(self.flat_parameters, bucket)

    def owns(self, parameter: Tensor) -> bool:
        """Return whether the parameter is still here, and not with buffers that were made later."""
        return getattr(parameter, "sharded_by", None) == self._number

    def record_versions(self) -> None:
        """Note that the parameters are as a step has left them; a backward pass through older values is refused."""
        for index in self._shared:
            self.parameters[index].data.copy_(self.parameter_homes[index])
        torch.autograd.graph.increment_version(self.parameters)
        self._versions = [p._version for p in self.parameters]

    def rebind_if_moved(self) -> bool:
        """Take home parameters that were moved out; return whether one was moved or written to since the last record.

        What is written through `.data` does not show here. Raises RuntimeError, naming the parameter, for one that has
        another shape, dtype or device than it had, and for one that belongs to a later optimizer.
        """
        touched = self._versions != [p._version for p in self.parameters]
        self._renew_homes()
        self._warn_of_formats(i for i, p in enumerate(self.parameters) if p.data_ptr() != self._addresses[i])
        for index, (name, p, home) in enumerate(zip(self.names, self.parameters, self.parameter_homes, strict=True)):
            if not hasattr(p, "sharded_by"):  # `swap_tensors` takes along what was written on a tensor
                vars(p).update(self._marks[index])
            if not self.owns(p):
                raise RuntimeError(f"parameter {name!r} belongs to an optimizer that was made later; use that one.")
            if (p.data_ptr(), *_looks(p)) == (home.data_ptr(), *_looks(home)):
                continue
            if p.shape != home.shape or p.dtype != home.dtype or p.device != home.device:
                now, before = [f"{list(t.shape)} {dtype_name(t.dtype)} on {t.device}" for t in (p, home)]
                raise RuntimeError(
                    f"parameter {name!r} is now {now}, and was {before} when the optimizer was made; "
                    "change the model first, then make its optimizer."
                )
            touched |= self._take_in(index)
        return touched

    def refresh_masters(self) -> None:
        """Where a parameter is no longer what its master weight rounds to, somebody has written it: let it count."""
        for bucket, master in self.masters.items():
            shard = self.parameters_of(bucket)[1]
            if master.dtype != shard.dtype:
                follow_writes_(master, shard)

    def scale_rows_(self, factors: Mapping[Tensor, Tensor]) -> list[Bucket]:
        """Multiply parameters row by row, masters included; return the buckets whose parameters are yet to be gathered.

        factors: {parameter: of each of its rows, [I_tp]}. What is its own master is scaled whole, by every rank.
        """
        rows = {index: factors[p] for index, p in enumerate(self.parameters) if p in factors}
        behind = []
        for bucket in (bucket for bucket in self.buckets if rows.keys() & set(bucket.params)):
            if self.masters[bucket].dtype == self.parameters_of(bucket)[1].dtype:
                for index in rows.keys() & set(bucket.params):
                    home = self.parameter_homes[index]
                    home.mul_(rows[index].view(-1, *[1] * (home.ndim - 1)))
                continue
            for piece in (piece for piece in self.pieces[bucket] if piece.index in rows):
                row_numel = math.prod(piece.meta.shape[1:])
                each = rows[piece.index].repeat_interleave(row_numel)[piece.meta.range_in_param.as_slice]
                piece.weight.mul_(each)
            behind.append(bucket)
        return behind

    def _warn_of_formats(self, moving_in: Iterable[int]) -> None:
        """Warn, once, of kernels in another memory format than that of the flat storage: convolutions choose by it."""
        looked_at = [(self.names[i], self.parameters[i]) for i in moving_in]
        others = [name for name, p in looked_at if p.ndim >= 4 and not p.is_contiguous() and not _stays(p)]
        if others and not self._warned_of_formats and self.grid.world.rank == 0:
            warn_of_formats(others)
        self._warned_of_formats |= bool(others)

    def _take_in(self, index: int) -> bool:
        """Let a parameter live in its home, or keep a copy there of one in shared memory; return whether it changed."""
        p, home = self.parameters[index], self.parameter_homes[index]
        self._shared.discard(index)
        if _stays(p):
            self._shared.add(index)
            changed = not torch.equal(p.data, home)
            if changed:
                home.copy_(p.data)
            return changed
        p.data = home.copy_(p.data.clone())
        return True

    def _renew_homes(self) -> None:
        """Make homes anew whose storage has left the flat one: share_memory moves it for all who have the tensor."""
        for homes, flats, addresses in (
            (self.parameter_homes, self.flat_parameters, self._addresses[: len(self.metas)]),
            (self.gradient_homes, self.flat_gradients, self._addresses[len(self.metas) :]),
        ):
            for index, (meta, address) in enumerate(zip(self.metas, addresses, strict=True)):
                if homes[index].data_ptr() != address:
                    homes[index] = _home(flats, meta)

    def _storage(self, size: int, dtype: str) -> Tensor:
        return torch.zeros(size, dtype=getattr(torch, dtype), device=self.grid.device)

    def _whole_and_shard(self, storages: list[Tensor], bucket: Bucket) -> tuple[Tensor, Tensor]:
        flat = storages[bucket.buffer_idx]
        return flat[bucket.range.as_slice], flat[bucket.shard(self.grid.dp.rank).as_slice]

    def _master(self, bucket: Bucket) -> Tensor:
        dtype = getattr(torch, self.layout.buffers[bucket.buffer_idx].grad_dtype)
        return self.parameters_of(bucket)[1].to(dtype)  # the same tensor where the dtype is the same

    def _pieces(self, bucket: Bucket) -> list[Piece]:
        shard = bucket.shard(self.grid.dp.rank)
        pieces = []
        for index in bucket.params:
            meta = self.metas[index]
            if meta.owned:
                weight = self.masters[bucket][meta.local_range.relative_to(shard.start).as_slice]
                gradient = self.flat_gradients[bucket.buffer_idx][meta.local_range.as_slice]
                pieces.append(Piece(index, meta, weight, gradient))
        return pieces


def _stays(parameter: Tensor) -> bool:
    """Return whether a parameter keeps its own memory, because other processes may look at it."""
    # torch says so of all CUDA tensors, whose storage never moves
    return parameter.device.type == "cpu" and parameter.is_shared()


def follow_writes_(master: Tensor, rounded: Tensor) -> None:
    """Where a weight is no longer what its master rounds to, somebody has written it: let the master be that."""
    torch.where(master.to(rounded.dtype) == rounded, master, rounded, out=master)


def refuse_shared_memory(named_parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError for two parameters on one memory, because each would get a home of its own."""
    first: dict[int, str] = {}
    for name, p in named_parameters:
        if p.numel() and first.setdefault(p.data_ptr(), name) != name:
            raise ValueError(
                f"parameters {first[p.data_ptr()]!r} and {name!r} share memory, and would not any more; "
                "use one Parameter in both places."
            )


def refuse_elsewhere(named_parameters: Sequence[tuple[str, Tensor]], device: torch.device) -> None:
    """Raise ValueError for a parameter that is not on the grid's device: it would move there, and the inputs would not.

    An index counts where both have one: torch says "mps" and "mps:0" of the same.
    """
    for name, p in named_parameters:
        here, there = p.device, device
        if here.type != there.type or (None not in (here.index, there.index) and here.index != there.index):
            raise ValueError(
                f"parameter {name!r} is on {here}, and the grid on {there}; move the model to {there} before you make "
                f"its optimizer, or make the grid where the model is, such as Grid.alone({str(here)!r})."
            )


def _looks(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _home(
    flats: Sequence[Tensor],  # each [size]
    meta: DistMeta,
) -> Tensor:  # [I_tp, J]
    """Return a tensor with the memory of its flat storage, but a storage and a version of its own.

    A plain view would not do: saving one layer would save the flat storage with it, and a write
    to one `.grad` would look like a write to all of them.
    """
    return torch.from_dlpack(flats[meta.buffer_idx][meta.global_range.as_slice].view(meta.shape))
