"""Chapter 9's five-minute puzzle: what an all-gather leaves in memory, turned into the matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from muonbook.puzzles.five_minutes import FiveMinutes


def put_together(
    received: Tensor,  # flat: rank 0's block, rank 1's, ...
    block: tuple[int, int],  # the shape of each
    dim: int,  # along which they were cut
) -> Tensor:
    """Return the whole matrix."""
    blocks = received.view(-1, *block)  # [T, a, b]
    return torch.cat(list(blocks), dim)


PUT_TOGETHER = FiveMinutes(
    put_together,
    cases=(
        (torch.arange(8), (1, 4), 0),
        (torch.arange(8), (2, 2), 1),
        (torch.arange(12), (2, 2), 1),
    ),
    nudge="Its first row should begin with rank 0's first row and go on with rank 1's.",
    goal="Turn what an all-gather leaves in memory into the whole matrix, for a cut along either dimension.",
)
