"""Chapter 10's five-minute puzzle: a matrix cut over TP, then over DP, put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muonbook.puzzles.five_minutes import FiveMinutes


def cut_twice(matrix: Tensor, tp: int, dp: int, dim: int) -> list[list[Tensor]]:
    """Return [tp][dp] flat pieces: blocks along `dim`, then runs of each."""
    return [list(block.flatten().chunk(dp)) for block in matrix.chunk(tp, dim)]


def whole(
    shards: Sequence[Sequence[Tensor]],  # [tp][dp], flat
    block: tuple[int, int],  # the shape of a TP-local matrix
    dim: int,  # along which TP cut
) -> Tensor:
    """Return the matrix."""
    blocks = [torch.cat(list(pieces)).view(block) for pieces in shards]  # over DP
    return torch.cat(blocks, dim)  # over TP


WHOLE = FiveMinutes(
    whole,
    cases=(
        (cut_twice(torch.arange(12).view(3, 4), 2, 2, 1), (3, 2), 1),
        (cut_twice(torch.arange(12).view(4, 3), 2, 2, 0), (2, 3), 0),
    ),
    nudge="It was cut over TP first, then over DP. Undo the last cut first.",
    goal="Put a matrix together that was cut over tensor-parallel ranks and then over data-parallel ranks.",
)
