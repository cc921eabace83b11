"""A tensor of the whole model, of which this rank holds some boxes: what a checkpoint saves and loads.

torch.distributed.checkpoint asks an object which chunks of a global tensor it has, and hands them around; where they
come from is nobody's business. So a DTensor's shard, a TP-local block and ZeRO-1's flat run of a block all become
boxes of one tensor, and a state that one grid has saved is loaded by any other.

A flat run is no rectangle, but a few: the end of a row, whole rows, the beginning of a row. Each is contiguous in the
run, so it is saved from there and loaded to there without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from distmuon.sharding.boxes import Box, all_of, extent, volume
from distmuon.sharding.layout import ParamSpec, Range


class ShardView(Tensor):
    """A global tensor, and this rank's boxes of it with their values, in memory that loading writes to.

    It speaks the protocol by which torch.distributed.checkpoint treats DTensor (`_Checkpointable`), and has no values
    of its own: nothing can be computed with it.
    """

    held: dict[tuple[int, ...], tuple[Box, Tensor]]  # by where each box begins

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, held: Sequence[tuple[Box, Tensor]]) -> ShardView:
        made = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)  # type: ignore[attr-defined]
        made.held = {tuple(side.start for side in box): (box, value) for box, value in held if volume(box)}
        return made

    def copied(self) -> ShardView:
        """Return the same boxes with values of their own, in the host's memory."""
        found = self.blank(self.dtype)
        found.copy_from(self)
        return found

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


def boxes_of_flat_range(
    spec: ParamSpec,
    tp_size: int,
    tp_rank: int,
    run: Range,
    values: Tensor,  # [n], the elements `run` of the TP-local parameter, flat
) -> list[tuple[Box, Tensor]]:
    """Return the boxes, in the whole parameter, of a flat run of a TP-local one."""
    found = []
    for box, where in boxes_of_run(spec.shape, run):
        value = values[where.relative_to(run.start).as_slice].view(extent(box))
        found += to_global(spec, tp_size, tp_rank, box, value)
    return found


def to_global(
    spec: ParamSpec,
    tp_size: int,
    tp_rank: int,
    box: Box,  # of the TP-local parameter
    value: Tensor,
) -> list[tuple[Box, Tensor]]:
    """Return the same as boxes of the whole parameter: one, or one for each of the parts that TP cuts by themselves."""
    dim = spec.tp_split_dim
    if dim is None:
        return [(box, value)]
    found = []
    for here, begin in _segments(spec, tp_size, tp_rank):
        if (common := box[dim].intersect(here)).size:
            start = begin + common.start - here.start
            place = (*box[:dim], Range(start, start + common.size), *box[dim + 1 :])
            cut = common.relative_to(box[dim].start)
            found.append((place, value.narrow(dim, cut.start, cut.size)))
    return found


def boxes_of_run(shape: Sequence[int], run: Range) -> list[tuple[Box, Range]]:
    """Return a run of elements of a tensor in row-major order as boxes, each with its part of the run."""
    if not run.size:
        return []
    if not shape:
        return [((), run)]
    row = math.prod(shape[1:])
    first, last = -(-run.start // row), run.end // row  # whole rows
    if first > last:  # inside one row
        return _in_row(shape, last, run)
    found = _in_row(shape, first - 1, Range(run.start, first * row))
    if first < last:
        found.append(((Range(first, last), *all_of(shape[1:])), Range(first * row, last * row)))
    return found + _in_row(shape, last, Range(last * row, run.end))


def _in_row(shape: Sequence[int], number: int, run: Range) -> list[tuple[Box, Range]]:
    origin = number * math.prod(shape[1:])
    inside = boxes_of_run(shape[1:], run.relative_to(origin)) if run.size else []
    return [((Range(number, number + 1), *box), where.relative_to(-origin)) for box, where in inside]


def _segments(spec: ParamSpec, tp_size: int, tp_rank: int) -> list[tuple[Range, int]]:
    """Return (range along the cut dimension that lies together here, where it begins in the whole parameter)."""
    dim = spec.tp_split_dim
    assert dim is not None
    if dim != 0:
        return [(Range(0, spec.shape[dim]), tp_rank * spec.shape[dim])]
    found, here, there = [], 0, 0
    for local, whole in zip(spec.local_parts, spec.whole_parts(tp_size), strict=True):
        found.append((Range(here, here + local.rows), there + tp_rank * local.rows))
        here, there = here + local.rows, there + whole.rows
    return found
