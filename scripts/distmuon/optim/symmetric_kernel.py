"""A symmetric product on an NVIDIA GPU: half of it is computed, the other half is its mirror image.

cuBLAS has no such product in half precision, so this is a kernel of our own, in Triton, which torch's packages for GPUs
bring along. It cuts the result into square tiles. A program of the GPU computes one tile on or below the diagonal, and
writes it twice.

How much that gains: `book/results/gpu.json`. Source of the idea: Zhang, Amsel, Chen and Dao (2026).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Found by trying: the rows and columns of a tile, how much of a sum is loaded at a time, how many rows of tiles share
# the cache.
TILE, DEPTH, GROUP = 128, 64, 8
WARPS, STAGES = 4, 4


@triton.jit
def _one_tile(  # type: ignore[no-untyped-def]
    left,  # descriptor of [matrices, rows, inner]
    right,  # the same, of the transposed right factor
    also,  # pointer to [matrices, rows, rows], symmetric
    out,  # pointer to the same
    rows,
    inner,
    scale,
    keep,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out <- scale left right^T + keep also, in one tile and its mirror image."""
    # Which tile: GROUP rows of tiles are gone through column by column, so that what is loaded is loaded again soon.
    tiles = tl.cdiv(rows, TILE)
    group, within = tl.program_id(0) // (GROUP * tiles), tl.program_id(0) % (GROUP * tiles)
    height = min(tiles - group * GROUP, GROUP)
    i, j = group * GROUP + within % height, within // height
    if i >= j:
        matrix = tl.program_id(1)
        total = tl.zeros((TILE, TILE), tl.float32)
        for k in tl.range(0, inner, DEPTH):
            one = left.load([matrix, i * TILE, k]).reshape(TILE, DEPTH)
            other = right.load([matrix, j * TILE, k]).reshape(TILE, DEPTH)
            total = tl.dot(one, other.T, total)

        row = (i * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
        column = (j * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
        inside = (row < rows) & (column < rows)
        begin = matrix.to(tl.int64) * rows * rows
        total *= scale
        if ADD:
            total += keep * tl.load(also + begin + row * rows + column, mask=inside, other=0).to(tl.float32)
        if i == j:  # its two halves are rounded differently, and what is not symmetric grows from step to step
            total = tl.where(row >= column, total, total.T)
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + begin + row * rows + column, rounded, mask=inside)
        if i > j:
            tl.store(out + begin + column.T * rows + row.T, rounded.T, mask=inside.T)


def symmetric_product(
    left: Tensor,  # [..., m, k], float16 or bfloat16, contiguous, m and k multiples of 8
    right: Tensor,  # [..., k, m]; symmetric, or left^T
    also: Tensor | None,  # [..., m, m], symmetric and contiguous
    scale: float,
    keep: float,
) -> Tensor:  # [..., m, m], symmetric to the bit
    """Return scale left right + keep also, which has to be symmetric but for rounding: the lower half is taken."""
    *_, rows, inner = left.shape
    out = left.new_empty(*left.shape[:-1], rows)
    one = _described(left)
    # of a symmetric factor the rows are the columns
    other = one if right.data_ptr() == left.data_ptr() else _described(right if right.stride(-1) == 1 else right.mT)
    numbers: dict[str, Any] = dict(TILE=TILE, DEPTH=DEPTH, GROUP=GROUP, num_warps=WARPS, num_stages=STAGES)
    with torch.cuda.device_of(left):
        _one_tile[(triton.cdiv(rows, TILE) ** 2, max(1, out.numel() // rows**2))](
            one, other, out if also is None else also, out, rows, inner, scale, keep, ADD=also is not None, **numbers
        )
    return out


def _described(factor: Tensor) -> TensorDescriptor:
    factor = factor.reshape(-1, *factor.shape[-2:])
    return TensorDescriptor(factor, list(factor.shape), list(factor.stride()), [1, TILE, DEPTH])
