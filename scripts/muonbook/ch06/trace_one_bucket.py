"""One bucket of a few weights on its way through ZeRO-1's step: what every rank held, and whose it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distmuon.launch import World
from distmuon.optim.zero1_adamw import Zero1AdamW
from distmuon.sharding.grid import Grid
from muonbook.provenance import with_sources


def follow(world: World, size: int) -> list[dict[str, Any]] | None:
    """Take a bucket of `size` weights through one step, move by move; return what each rank held, and whose it was."""
    grid = Grid.of(world)
    rank, ranks = grid.dp.rank, grid.dp.size
    weight = torch.nn.Parameter(10.0 * torch.arange(1, size + 1, device=grid.device))
    optimizer = Zero1AdamW([("weight", weight)], grid, lr=1.0, weight_decay=0.0)
    (bucket,) = optimizer.buckets
    shard = bucket.shard(rank).as_slice
    flat, gradients = optimizer.buffers.flat_parameters[0], optimizer.buffers.flat_gradients[0]
    signs = torch.tensor([1.0, -1.0]).repeat(size // 2)
    gradient = (signs * (torch.arange(size) % 3 + 2 * rank + 1)).to(grid.device)  # every rank has seen other data

    def reduce_scatter(tensor: Tensor) -> Tensor:
        gradients[:size] = tensor
        optimizer.reduce_scatter(bucket)
        return gradients[shard].clone()

    def all_gather(tensor: Tensor) -> Tensor:
        flat[shard] = tensor
        optimizer.all_gather(bucket)
        return flat.clone()

    mean, mean_sources = with_sources(reduce_scatter, gradient, rank, ranks)
    optimizer.zero_grad()
    weight.grad, old = gradient.clone(), flat[shard].tolist()
    optimizer.step()
    new = flat[shard].clone()
    whole, whole_sources = with_sources(all_gather, new, rank, ranks)
    return world.gather({
        "gradient": gradient.tolist(), "mean": mean, "mean_sources": mean_sources,
        "old": old, "new": new.tolist(), "whole": whole, "whole_sources": whole_sources,
    })  # fmt: skip


def report(ranks: list[dict[str, Any]]) -> tuple[bool, list[dict[str, Any]]]:
    """Print what AdamW did to each rank's shard; all is well if all ranks end with the same weights."""
    for number, rank in enumerate(ranks):
        print(f"DP rank {number}   weights  " + "".join(f"{value:>5g}" for value in rank["old"]))
        print("     mean gradient  " + "".join(f"{value:>5g}" for value in rank["mean"]))
        print("       after AdamW  " + "".join(f"{value:>5g}" for value in rank["new"]))
    alike = all(rank["whole"] == ranks[0]["whole"] for rank in ranks)
    print(f"After the all-gather, every rank has the same {len(ranks[0]['whole'])} weights: {alike}.")
    return alike, ranks
