"""A tensor of the whole model, of which this rank holds some boxes: what a checkpoint saves and loads.

torch.distributed.checkpoint asks an object which chunks of a global tensor it has, and hands them around; where they
come from is nobody's business. So a DTensor's shard, a TP-local block and ZeRO-1's flat run of a block all become
boxes of one tensor (see `local_views`), and a state that one grid has saved is loaded by any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from distmuon.sharding.boxes import Box, extent, volume


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
