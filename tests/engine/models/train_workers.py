"""What ranks of the trainer are asked for."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import train

from distmuon.launch import World
from distmuon.models.run_settings import RunSettings


def texts_differ(world: World, settings: RunSettings) -> str:
    """Train where each rank reads a text of its own; return why that is refused."""
    text = train.corpus(settings.text)
    train.corpus = lambda name: replace(text, training=text.training + world.rank)  # type: ignore[assignment]
    return train.train(world, settings).refused


def timeouts(world: World, settings: RunSettings) -> list[float]:
    """Take a step; return how long each process group that there is then waits for a peer, in seconds."""
    _, optimizer, forward = train.build(world, settings, 256)
    tokens = torch.zeros(2, settings.context, dtype=torch.long)
    forward(tokens, tokens).backward()
    optimizer.step()
    groups = dist.distributed_c10d._world.pg_map
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]  # no public way
