"""How long a checkpoint keeps training waiting: the save that blocks, and the one in the background, in turns."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distmuon import checkpoint
from distmuon.launch import World
from distmuon.optim.muonw import MuonW
from muonbook.ch17.four_steps import give_gradients, on_mesh
from muonbook.measure import interleaved_timing, results


def cost(world: World, width: int, layers: int, rounds: int) -> dict[str, Any]:
    """Return the spread, over rounds, of the time that `async_save` blocks over that of `save`. Collective."""
    torch.set_num_threads(1)
    model, _ = on_mesh(world, False, width, layers)
    optimizer = MuonW(model)
    give_gradients(list(model.parameters()))
    optimizer.step()
    saved, running = 0, Future[None]()
    running.set_result(None)
    place = [tempfile.TemporaryDirectory() if world.rank == 0 else None]
    where = [None if place[0] is None else place[0].name]
    dist.broadcast_object_list(where, src=0)

    def folder() -> Path:
        nonlocal saved
        saved += 1
        return Path(str(where[0]), f"step-{saved}")

    def in_background() -> None:
        nonlocal running
        running = checkpoint.async_save(folder(), model, optimizer)

    def before(_: str) -> None:
        running.result()
        dist.barrier()

    acts = {"save": lambda: checkpoint.save(folder(), model, optimizer), "async_save": in_background}
    seconds = interleaved_timing.take_turns(acts, rounds, before=before)
    before("")
    if place[0] is not None:
        place[0].cleanup()
    bytes_here = sum(t.numel() * t.element_size() for t in model.parameters()) // world.size
    share = interleaved_timing.ratios(seconds["async_save"], seconds["save"])
    return {"width": width, "parameter_bytes_of_a_rank": bytes_here, "blocked": results.spread(share)}
