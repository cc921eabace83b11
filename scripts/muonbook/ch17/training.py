"""The reader's program with its one new line: train, save in the background, load on another mesh, go on."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distmuon import checkpoint
from distmuon.launch import World
from distmuon.metrics import JsonLines, Metrics
from distmuon.optim.muonw import MuonW
from muonbook.ch17.existing_program import batch
from muonbook.ch17.four_steps import on_mesh, whole

BATCH = 64  # images in a step, of all ranks together
TOLD = 3  # steps between two lines


def train(
    world: World,
    hybrid: bool,
    steps: int,
    load: str | None,
    save: str | None,
    save_at: int | None,
    watch: str | None,
) -> tuple[list[str], str]:
    """Train up to step `steps`, from the start or from a checkpoint; return what to print, and what was refused.

    load, save: folders. save_at: after which step (None: the last). watch: a file for what `Metrics` sees.
    """
    torch.set_num_threads(1)
    model, dp = on_mesh(world, hybrid)
    optimizer = MuonW(model, lr=0.01)  # the new line
    said: list[str] = []
    begin, saving = 0, Future[None]()
    saving.set_result(None)
    metrics = None
    try:
        if load is not None:
            notes = checkpoint.load(load, model, optimizer)
            begin, same = notes["step"], notes["digest"] == digest(model, optimizer)
            said.append(f"step {begin:3d}   loaded; whole tensors as they were, bit for bit: {same}")
        if watch is not None:
            metrics = Metrics(optimizer, every=2, to=[JsonLines(watch)], scalars={"loss": "mean"}, start=begin)
        for step in range(begin + 1, steps + 1):
            images, labels = batch(step, BATCH, dp.rank, dp.size, world.device)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            if metrics is not None:
                metrics.record(loss=loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if step % TOLD == 0:
                mean = dp.all_reduce(loss.detach(), "loss").item() / dp.size
                said.append(f"step {step:3d}   loss {mean:.2f}")
            if save is not None and step == (save_at or steps):
                notes = {"step": step, "digest": digest(model, optimizer)}
                saving = checkpoint.async_save(save, model, optimizer, notes)
                said.append(f"step {step:3d}   copied; a thread writes it")
        saving.result()
    except checkpoint.CheckpointError as error:
        return said, str(error)
    return said, ""


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the sha256 of all whole tensors, those of the state too: the same on any mesh, if they are. Collective."""
    found = hashlib.sha256()
    for p in model.parameters():
        state: dict[str, Any] = optimizer.state[p]
        for tensor in (p, *(state[key] for key in sorted(state))):
            found.update(_bytes_of(whole(tensor)))
    return found.hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
