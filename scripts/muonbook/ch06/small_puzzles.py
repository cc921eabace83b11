"""Chapter 6's five-minute puzzles: a rank's shard of a flat tensor, and what each stage of ZeRO keeps."""

from __future__ import annotations

import torch

from muonbook.puzzles.five_minutes import FiveMinutes


def shard(flat: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return this rank's shard [ceil(n / ranks)] of a flat tensor [n], padded with zeros."""
    size = -(-len(flat) // ranks)  # rounded up
    padded = torch.cat([flat, flat.new_zeros(ranks * size - len(flat))])
    return padded[rank * size : (rank + 1) * size]


SHARD = FiveMinutes(
    shard,
    cases=tuple((torch.arange(1.0, n + 1), rank, 4) for n, rank in ((8, 1), (5, 0), (5, 2), (5, 3), (3, 3), (10, 2))),
    nudge="All shards are equally long: pad with zeros until the ranks divide the length, then cut.",
    goal="Cut a rank's shard out of a flat tensor whose length the number of ranks need not divide.",
)


def kept_bytes(stage: int, ranks: int) -> float:
    """Return the bytes per parameter that one rank keeps; stage 0 cuts nothing."""
    parameters, gradients, optimizer = 2.0, 4.0, 12.0  # bf16, float32, and float32 masters, m and v
    if stage >= 1:
        optimizer /= ranks
    if stage >= 2:
        gradients /= ranks
    if stage >= 3:
        parameters = 0.0  # the masters are what a layer is gathered from
    return parameters + gradients + optimizer


KEPT_BYTES = FiveMinutes(
    kept_bytes,
    cases=((0, 4), (1, 4), (1, 64), (2, 4), (2, 8), (3, 4), (3, 64)),
    nudge="12 bytes are the optimizer's, 4 the gradient's, 2 the parameter's.",
    goal="Compute the bytes per parameter that a rank keeps in each stage of ZeRO.",
)
