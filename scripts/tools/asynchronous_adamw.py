"""AdamW whose gradients are all-reduced matrix by matrix, each call awaited at once, or all of them started first.

The program is that of the report "Reproducing and Validating Distributed Muon", in small: products in place of forward
and backward, an all-reduce and a division per gradient, and a step of torch's AdamW.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmuon.launch import World
from muonbook.measure import interleaved_timing
from muonbook.measure.reported import MATRICES

SMALLER = 4  # in each dimension than the report's matrices
PRODUCTS, WIDTH = 20, 256
WAYS = ("one by one", "all started first")


class Replica:
    """Five matrices on one rank, their gradients, and AdamW. durations: of each step's all-reduces, added up."""

    def __init__(self, rank: int, asynchronous: bool) -> None:
        shapes = [tuple(n // SMALLER for n in shape) for shape, _ in MATRICES]
        same, own = (torch.Generator().manual_seed(seed) for seed in (0, 1 + rank))
        self.parameters = [torch.nn.Parameter(torch.randn(shape, generator=same)) for shape in shapes]
        self.gradients = [torch.randn(shape, generator=own) for shape in shapes]
        self.product = torch.eye(WIDTH)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.average = self.all_at_once if asynchronous else self.one_by_one
        self.durations: list[float] = []

    def step(self) -> None:
        """Take one training step. Collective."""
        for _ in range(PRODUCTS):
            self.product = self.product @ self.product
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient.clone()
        self.durations.append(self.average([p.grad for p in self.parameters if p.grad is not None]))
        self.optimizer.step()

    def one_by_one(self, gradients: list[Tensor]) -> float:
        total = 0.0
        for gradient in gradients:
            total += interleaved_timing.clocked(partial(dist.all_reduce, gradient))
            gradient /= dist.get_world_size()
        return total

    def all_at_once(self, gradients: list[Tensor]) -> float:
        total, started = 0.0, list[tuple[Any, float]]()
        for gradient in gradients:
            began = time.perf_counter()
            started.append((dist.all_reduce(gradient, async_op=True), began))
        for gradient, (work, began) in zip(gradients, started, strict=True):
            work.wait()
            total += time.perf_counter() - began
            gradient /= dist.get_world_size()
        return total


def race(world: World, rounds: int) -> dict[str, Any]:
    """Let both take steps in turn; return this rank's seconds per step, and of the all-reduces added up, of each."""
    replicas = {way: Replica(world.rank, asynchronous=way != WAYS[0]) for way in WAYS}
    acts = {way: replica.step for way, replica in replicas.items()}
    seconds = interleaved_timing.take_turns(acts, rounds, before=lambda _: dist.barrier())
    one, other = (replica.parameters for replica in replicas.values())
    return {
        "seconds": seconds,
        "durations": {way: replica.durations[-rounds:] for way, replica in replicas.items()},
        "equal_parameters": all(torch.equal(a, b) for a, b in zip(one, other, strict=True)),
    }
