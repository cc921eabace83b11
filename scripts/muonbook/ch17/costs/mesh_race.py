"""The race: MuonW and torch.optim.Muon take the same step on the same DTensors, in turns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distmuon.launch import World
from distmuon.optim.muonw import MuonW
from muonbook.ch17.four_steps import TORCH, give_gradients, make, matrices_of, on_mesh
from muonbook.measure import interleaved_timing, results

OURS = "MuonW"


def race(world: World, hybrid: bool, width: int, layers: int, rounds: int) -> dict[str, Any]:
    """Return the spread, over rounds, of our time for a step over torch's; all ranks begin and end together."""
    torch.set_num_threads(1)
    steps = {}
    for name in (OURS, TORCH):
        model, dp = on_mesh(world, hybrid, width, layers)
        parameters = matrices_of(model)
        give_gradients(parameters)
        optimizer = MuonW(parameters, lr=0.02) if name == OURS else make(name, parameters, dp)
        steps[name] = interleaved_timing.ended(optimizer.step, world.device)

    def to_the_last(name: str) -> None:
        steps[name]()
        dist.barrier()

    acts = {name: (lambda name=name: to_the_last(name)) for name in steps}
    seconds = interleaved_timing.take_turns(acts, rounds, before=lambda _: dist.barrier())
    ratio = interleaved_timing.ratios(seconds[OURS], seconds[TORCH])
    return {"width": width, "matrices": len(parameters), "ratio": results.spread(ratio)}
