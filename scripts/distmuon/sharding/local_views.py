"""What a rank holds of a parameter, and what its optimizer keeps of it: boxes of the whole tensor, whoever has cut it.

    whole parameters                    one process, DDP
    boxes                               DTensors: FSDP2, tensor parallelism, replicas of them
    flat runs of TP-local parameters    Zero1AdamW, DistributedMuon

A flat run is no rectangle, but a few: the end of a row, whole rows, the beginning of a row. Each is contiguous in the
run, so it is read, saved and loaded where it lies.

Checkpoints, metrics and QK-Clip ask an optimizer for its `local_views()`, and for nothing else of who holds what. So an
optimizer of your own is saved, loaded on another grid, watched and clipped as soon as it has that one method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distmuon.sharding.boxes import Box, all_of, extent, overlap, volume, within
from distmuon.sharding.layout import ParamSpec, Range
from distmuon.sharding.meshes import own_box

Boxes = Sequence[tuple[Box, Range]]  # boxes of a whole tensor, and which elements of a smaller one they are, flat


@dataclass(frozen=True)
class LocalView:
    """What this rank holds of one parameter. `optimizer.local_views()` returns one for each, in the order of groups.

    name: the parameter's, the same on all ranks; matched with the model's by the tensor, not by the name.
    parameter: as it is in `param_groups`.
    shape: of the whole parameter.
    held: which boxes of the whole the parameter's own tensor holds here (of a DTensor, its local one).
    values: what the step updates, in the memory where it lives: that tensor itself, or a copy of a part of it. One in a
        wider dtype (master weights) is also in the state, as "master_weight". None where this rank keeps nothing of the
        parameter. What `optimizer.state[parameter]` has in the same shape lies alike; numbers of shape () belong to the
        parameter as a whole.
    boxes: which boxes of the whole the values are.
    dtype: in which the optimizer keeps them, from its next step on; None: that of `values`.
    counted: whether sums over all ranks count these elements; of the ranks that keep the same ones, one does.
    gradient: of the latest step, as it was used, in the shape of `values`; None where there was none.
    matrices: which Newton–Schulz takes: the box of each, and its shape [A, B]. ns_dtype: in which it sees them.
    row_boxes: of which of the rows of all those matrices `optimizer.state[parameter]` has here what NorMuon keeps,
        "row_exp_avg_sq", and which of its elements they are.
    """

    name: str
    parameter: Tensor
    shape: tuple[int, ...]
    held: Boxes
    values: Tensor | None
    boxes: Boxes
    dtype: torch.dtype | None = None
    counted: bool = True
    gradient: Tensor | None = None
    matrices: Sequence[tuple[Box, tuple[int, int]]] = ()
    ns_dtype: torch.dtype | None = None
    row_boxes: Boxes = ()

    @classmethod
    def in_place(cls, name: str, parameter: Tensor, **more: Any) -> LocalView:
        """Return the view of a parameter that is updated where it is, a plain tensor or a DTensor. more: other fields.

        Raises ValueError, naming the parameter, for a DTensor that does not hold what its placements say.
        """
        boxes, gradient = boxes_in_place(name, parameter), parameter.grad
        found = {"values": local(parameter.detach()), "gradient": None if gradient is None else local(gradient)}
        return cls(name, parameter, tuple(parameter.shape), boxes, boxes=boxes, **found | more)

    @classmethod
    def of_run(cls, name: str, parameter: Tensor, values: Tensor, start: int, **more: Any) -> LocalView:
        """Return the view of a parameter that every rank holds whole, and of which this rank updates a flat run.

        values: [n], its elements from `start` on, in row-major order; none of them where n is 0. more: other fields.
        """
        shape = tuple(parameter.shape)
        boxes = boxes_of_run(shape, Range(start, start + values.numel()))
        return cls(name, parameter, shape, everything(shape), values, boxes, **more)

    @property
    def kept_dtype(self) -> torch.dtype:
        return self.dtype or (self.parameter if self.values is None else self.values).dtype

    @property
    def rows(self) -> int:
        """How many rows all the matrices have together."""
        return sum(rows for _, (rows, _) in self.matrices)

    @property
    def is_whole(self) -> bool:
        """Whether this rank keeps all of the parameter."""
        return sum(volume(box) for box, _ in self.boxes) == math.prod(self.shape)

    def of(self, values: Tensor) -> list[tuple[Box, Tensor]]:
        """Return a tensor that lies as `values` do as boxes of the whole, in the same memory."""
        return at(self.boxes, values)

    @property
    def keeps_master(self) -> bool:
        """Whether the optimizer keeps a wider copy of the parameter."""
        return self.kept_dtype != self.parameter.dtype

    def new_state(self, dtype: torch.dtype) -> Tensor:
        """Return zeros for the optimizer's state: like the values, or like the parameter if that is a DTensor."""
        like = self.parameter if isinstance(self.parameter, DTensor) else self.values
        assert like is not None
        return torch.zeros_like(like, dtype=dtype)

    def follow_parameter_(self) -> None:
        """Fill the values from the parameter, where they are not its own memory."""
        if self.values is not None:
            ours = at(self.held, local(self.parameter.detach()))
            for box, into in self.of(self.values):
                fill_(into, box, ours)


def everything(shape: Sequence[int]) -> Boxes:
    """Return the one box of a tensor that is held whole, or of which one box is `shape`."""
    return [(all_of(shape), Range(0, math.prod(shape)))]


def boxes_in_place(name: str, tensor: Tensor) -> Boxes:
    """Return which box of the whole a DTensor's local tensor is; a plain tensor is the whole."""
    return [(own_box(name, tensor), Range(0, local(tensor).numel()))]


def at(boxes: Boxes, values: Tensor) -> list[tuple[Box, Tensor]]:
    """Return the boxes with their values, in the same memory."""
    return [(box, _cut(values, run, extent(box))) for box, run in boxes]


def fill_(into: Tensor, box: Box, boxes: Sequence[tuple[Box, Tensor]]) -> None:
    """Copy to a tensor, which holds `box` of a whole one, what other boxes of the whole have of it.

    What lies in the same memory is left alone.
    """
    for place, values in boxes:
        if (common := overlap(place, box)) is not None:
            target, source = into[within(common, box)], values[within(common, place)]
            if (target.data_ptr(), target.dtype) != (source.data_ptr(), source.dtype):
                target.copy_(source)


def boxes_of_run(shape: Sequence[int], run: Range) -> Boxes:
    """Return a run of elements of a tensor, in row-major order, as boxes of it; elements are counted in the run."""
    if not shape:
        return [((), Range(0, 1))] if run.size else []
    row, start = math.prod(shape[1:]), run.start
    found: list[tuple[Box, Range]] = []
    while start < run.end:
        number, inside = divmod(start, row)
        rows = 0 if inside else (run.end - start) // row  # whole ones that begin here
        end = start + rows * row if rows else min(run.end, (number + 1) * row)
        across = [(all_of(shape[1:]), Range(0, end - start))]
        for box, where in across if rows else boxes_of_run(shape[1:], Range(inside, inside + end - start)):
            found.append(((Range(number, number + max(rows, 1)), *box), where.relative_to(run.start - start)))
        start = end
    return found


def over_tp(
    boxes: Boxes,  # of the TP-local parameter
    spec: ParamSpec,
    tp_size: int,
    tp_rank: int,
) -> Boxes:
    """Return the same as boxes of the whole parameter: one, or one for each of the parts that TP cuts by themselves."""
    dim, found = spec.tp_split_dim, []
    if dim is None:
        return boxes
    together = [part.rows for part in spec.local_parts] if dim == 0 else [spec.shape[dim]]  # lengths along dim
    for box, run in boxes:
        row = volume(box) // box[0].size if box[0].size else 0
        here = there = 0  # where the part begins in the TP-local parameter, and in the whole one
        for size in together:
            if (common := box[dim].intersect(Range(here, here + size))).size:
                start = there + tp_rank * size + common.start - here
                place = (*box[:dim], Range(start, start + common.size), *box[dim + 1 :])
                first = run.start + (common.start - box[0].start) * row if dim == 0 else run.start
                found.append((place, Range(first, first + volume(place))))
            here, there = here + size, there + size * tp_size
    return found


def rows_over_tp(spec: ParamSpec, tp_size: int, tp_rank: int) -> Boxes:
    """Return which of the rows of all matrices in the whole parameter are those of the matrices that this rank sees.

    Where TP cuts between matrices these are its own, otherwise all.
    """
    found: list[tuple[Box, Range]] = []
    here = there = 0  # where the part's rows begin among those seen here, and among all
    for seen, whole in zip(spec.seen_parts(tp_size), spec.whole_parts(tp_size), strict=True):
        size, total = (part.number * part.shape[0] for part in (seen, whole))
        start = there + (tp_rank * size if size < total else 0)
        found.append(((Range(start, start + size),), Range(here, here + size)))
        here, there = here + size, there + total
    return found


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in the same memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _cut(values: Tensor, run: Range, shape: tuple[int, ...]) -> Tensor:
    """Return a run of elements as a tensor of this shape, in the same memory, wherever its rows lie."""
    if values.shape == shape or not run.size:
        return values if values.shape == shape else values.new_empty(shape)
    if values.ndim == len(shape) and values.shape[1:] == shape[1:]:  # whole rows of a tensor that may have strides
        return values.narrow(0, run.start * shape[0] // run.size, shape[0])
    return values.view(-1)[run.as_slice].view(shape)
