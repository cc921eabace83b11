"""What ranks of the trainer are asked for."""

from __future__ import annotations

import torch
import torch.distributed as dist
import train

from distmuon.launch import World
from distmuon.models.run_settings import RunSettings


def timeouts(world: World, settings: RunSettings) -> list[float]:
    """Take a step; return how long each process group that there is then waits for a peer, in seconds."""
    _, optimizer, forward = train.build(world, settings, 256)
    tokens = torch.zeros(2, settings.context, dtype=torch.long)
    forward(tokens, tokens).backward()
    optimizer.step()
    groups = dist.distributed_c10d._world.pg_map
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]  # no public way
