"""Which matrices lie in a tensor, and which of them Newton–Schulz takes together, in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from distmuon.optim.fast_paths import BATCH, batching_pays
from distmuon.optim.options import NORM_OPTIONS, NS_OPTIONS
from distmuon.sharding.matrices import MatrixLayout, kind_of, parts
from distmuon.sharding.tensor_lists import places_by, runs


def matrices_in(
    tensor: Tensor,  # contiguous
    division: MatrixLayout,
) -> list[tuple[tuple[int, int], Tensor]]:
    """Return the matrices in a tensor, those of one shape in one view: ([a, b], view), in row-major order [n, a, b].

    A matrix whose rows lie in several TP blocks has no view of that shape, but one that holds its elements in order.
    """
    found = parts(division.matrices, tensor.shape)
    if kind_of(division.matrices) == "columns":
        (part,) = found
        return [(part.shape, tensor.unflatten(1, (part.number, -1)).movedim(1, 0))]
    rows = [part.number * part.shape[0] // division.blocks for part in found]
    blocks = tensor.view(division.blocks, sum(rows), -1)  # [blocks, rows of each, b]
    return [(part.shape, view) for part, view in zip(found, blocks.split(rows, 1), strict=True)]


def batches(
    tensors: Sequence[Tensor], groups: Sequence[Mapping[str, Any]], divisions: Sequence[MatrixLayout] = ()
) -> list[list[int]]:
    """Return which tensors to orthogonalize together: those of small matrices of equal shape under equal options, as
    many as `fast_paths.BATCH` has room for.

    groups: the parameter group of each tensor. One with `batched=False` keeps its matrices alone, which is what a
        bitwise comparison needs: a batched product may be summed in another order than a single one.
    divisions: as for `orthogonalize`.
    """
    divisions = divisions or [MatrixLayout(group["matrices"]) for group in groups]
    keys: list[tuple[Any, ...]] = []
    for index, (tensor, group, division) in enumerate(zip(tensors, groups, divisions, strict=True)):
        shapes = {tuple(tensor.shape)}
        if division.matrices != "whole":
            shapes = {part.shape for part in parts(division.matrices, tensor.shape)}
        pays = group["batched"] and all(batching_pays(shape, tensor.device) for shape in shapes)
        alike = (
            frozenset(shapes),
            tensor.dtype,
            tensor.device,
            *(str(group[name]) for name in (*NS_OPTIONS, *NORM_OPTIONS)),
        )
        keys.append(alike if pays else (index,))
    return [
        run for _, together in places_by(keys) for run in runs(together, [tensors[i].numel() for i in together], BATCH)
    ]
