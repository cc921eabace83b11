"""What `train.py` says of a run before its first step and after its last, a line for each thing, with its unit."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from distmuon.extras.checkpoint.runs import at_step, saved_steps
from distmuon.launch import World
from distmuon.models.corpus import Corpus
from distmuon.models.networks import Transformer
from distmuon.models.run_settings import LEAST, RunSettings
from distmuon.optim.distributed_muon import DistributedMuon
from distmuon.optim.param_groups import groups_for

SHARDED_BY = {"fsdp2": "FSDP2", "zero1": "ZeRO-1"}
WHO = {"muon": "Muon", "adamw": "AdamW"}


class Progress(NamedTuple):
    """What one start has done. first, last: steps made before it, and with it. seconds: from the first step to the end;
    training: those of them that went into steps, and not into evaluating and saving. held_out: (nats per token, after
    which step), None if it was not measured."""

    first: int
    last: int
    seconds: float
    training: float
    held_out: tuple[float, int] | None


def beginning(
    world: World, settings: RunSettings, text: Corpus, optimizer: torch.optim.Optimizer, first: int
) -> Iterator[str]:
    """Yield lines that say what is about to be made. first: steps that were made before."""
    with torch.device("meta"):  # whole, whatever the grid, and without storage
        model = Transformer(*settings.shape(text.vocabulary))
    size = sum(p.numel() for p in model.parameters())
    layers = f"{settings.layers} layers of width {settings.width} and {settings.heads} heads"
    yield _line("model", f"{size:,} parameters, {layers}, in {settings.dtype}; sees {settings.context:,} tokens")
    both = f"{len(text.training):,} tokens to learn from, {len(text.held_out):,} held out"
    yield _line("text", f"{settings.text}: {both}; a token is one {text.unit}")
    grid = f"{world.dp} DP x {world.tp} TP = {world.size} rank{'s' * (world.size > 1)}"
    yield _line("grid", f"{grid}, {world.backend} on {world.device}, sharded by {SHARDED_BY[settings.sharding]}")
    strategy = f", strategy {settings.strategy}" if isinstance(optimizer, DistributedMuon) else ""
    clipped = f"norm clipped to {settings.clip:g}" if settings.clip < math.inf else "not clipped"
    decay = f"weight decay {settings.weight_decay:g}"
    yield _line("optimizer", f"{type(optimizer).__name__}{strategy}; {decay}; gradients: {clipped}")
    groups = groups_for(model, settings.optimizer)
    for algorithm, who in WHO.items():
        mine = [pair for group in groups if group["algorithm"] == algorithm for pair in group["params"]]
        if mine:
            count = f"{sum(p.numel() for _, p in mine):,} parameters in {len(mine)} tensors"
            yield _line(who, f"{count}: {in_short(name for name, _ in mine)}")
    yield _line("lr", f"{settings.lr:g} after {settings.warmup:,} steps of warm-up{_then(settings)}")
    if left := settings.steps - first:
        each = f"{settings.batch} sequences x {settings.context:,} tokens = {settings.tokens_per_step:,} tokens"
        times = left * settings.tokens_per_step / len(text.training)
        yield _line("steps", f"{first + 1:,} to {settings.steps:,}, each {each}; in all {times:.2f} times the text")
    yield _line("folder", _where(settings))


def ending(settings: RunSettings, text: Corpus, made: Progress, generator: Path) -> Iterator[str]:
    """Yield lines that say what a start has done, and what can be done with it. generator: the program generate.py.

    The first has times in it, and differs from run to run.
    """
    if steps := made.last - made.first:
        tokens = steps * settings.tokens_per_step
        speed = f"{tokens / made.training:,.0f} tokens per second while training"
        yield _line("trained", f"{steps:,} steps, {tokens:,} tokens, in {made.seconds:.1f} s; {speed}")
    if made.held_out is not None:
        loss, step = made.held_out
        yield _line("held out", f"{loss_in_words(loss, text)} after step {step:,}")
    if settings.folder is not None and (saved := saved_steps(settings.folder)):
        yield _line("checkpoint", str(at_step(settings.folder, saved[0])))
        yield _line("try it", command_of(generator, settings.folder))


def step_in_words(loss: float, norm: float, lr: float, speed: float, text: Corpus) -> str:
    """Return what a step has come to. loss: nats per token. norm: of the gradient. speed: tokens per second."""
    found = f"loss {loss:.3f} nats per {text.unit}   gradient norm {norm:.2f}   lr {lr:.4f}"
    return f"{found}   {speed:,.0f} tokens per second"


def loss_in_words(nats: float, text: Corpus) -> str:
    """Return a loss in both units; for a text whose entropy is known, also that."""
    floor = "" if text.floor is None else f", the least possible is {text.floor:.3f} nats"
    return f"{nats:.3f} nats ({nats / math.log(2):.3f} bits) per {text.unit}{floor}"


def in_short(names: Iterable[str]) -> str:
    """Return names of parameters without what repeats: "blocks.*.{up, down}" for two in each of many blocks."""
    leaves_of: dict[str, dict[str, None]] = {}
    for name in names:
        module = re.sub(r"\.(weight|bias)$", "", re.sub(r"\.\d+\.", ".*.", name))
        parent, _, leaf = module.rpartition(".")
        leaves_of.setdefault(parent, {})[leaf] = None
    return ", ".join(
        f"{parent}.{{{', '.join(leaves)}}}" if parent else ", ".join(leaves) for parent, leaves in leaves_of.items()
    )


def command_of(program: Path, folder: str) -> str:
    """Return what to type here to run a Python program on a folder."""
    in_path = os.path.dirname(shutil.which("python") or "") == os.path.dirname(sys.executable)
    return shlex.join(["python" if in_path else _shorter(sys.executable), _shorter(program), folder])


def _shorter(path: str | Path) -> str:
    """Return a path from here, or from the root, whichever is shorter."""
    return min(os.path.relpath(path), os.path.abspath(path), key=len)


def _then(settings: RunSettings) -> str:
    """Return what the learning rate does after the warm-up, if it comes to that."""
    if settings.steps <= settings.warmup:
        return ""
    if settings.schedule == "constant":
        return ", then constant"
    return f", then {settings.schedule} to 0 in step {settings.steps:,}, but never below {settings.lr * LEAST:.3g}"


def _where(settings: RunSettings) -> str:
    if settings.folder is None:
        return "none, so nothing is saved; give --folder FOLDER to keep checkpoints and metrics.jsonl"
    return f"{settings.folder}, every {settings.save_every:,} steps; keeps the newest {settings.keep:,} checkpoints"


def _line(name: str, words: str) -> str:
    return f"{name:<11} {words}"
