"""A run's folder: a checkpoint every so many steps, of which the newest that can be believed is gone on from.

    save(at_step("runs/alice", 100), model, optimizer, notes={"step": 100})
    loaded = load_newest("runs/alice", model, optimizer)
    prune("runs/alice", 3)

A checkpoint appears whole or not at all, and goes that way too, whoever is killed at what moment.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from distmuon.extras.checkpoint.files import CheckpointError, Lock, is_free, place
from distmuon.extras.checkpoint.save_and_load import LOCK, UNFINISHED, load, on_rank_0
from distmuon.extras.checkpoint.tensors import Optimizers
from distmuon.optim.options import check_count

NAME = re.compile(r"step-(\d+)")
REMOVED = ".removed-"
CLAIM = ".lock"


class Loaded(NamedTuple):
    """What a run is gone on from.

    step: 0 where there was none.
    notes: those of that checkpoint.
    refused: why newer ones were not believed, newest first.
    """

    step: int
    notes: dict[str, Any]
    refused: list[str]


@contextlib.contextmanager
def claim(run: str | Path) -> Iterator[None]:
    """Keep a run's folder to this training, from all ranks, for as long as the block lasts or rank 0 lives.

    Raises CheckpointError on all ranks where another training has it: two would mix their checkpoints and metrics.
    Collective at the beginning; a rank may leave the block by itself.
    """
    locks: list[Lock] = []

    def take() -> None:
        folder = place(run)  # here, so that all ranks raise where rank 0 cannot say where that is
        words = "wait for it, or give this one another folder."
        folder.mkdir(parents=True, exist_ok=True)
        locks.append(Lock(folder / CLAIM, lambda who: f"{folder} is in use by another training, {who}; {words}"))

    on_rank_0(take)
    try:
        yield
    finally:
        for lock in locks:
            lock.release()


def at_step(run: str | Path, step: int) -> Path:
    """Return the folder of a run's checkpoint after this step. Raises ValueError for what is no number of steps."""
    check_count("step", step, 0)  # of any other, `saved_steps` would not see the folder
    return place(run) / f"step-{step:06d}"


def saved_steps(run: str | Path) -> list[int]:
    """Return after which steps there are complete checkpoints in a run's folder, newest first."""
    found = [NAME.fullmatch(path.name) for path in place(run).glob("step-*")]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def load_newest(run: str | Path, model: nn.Module, optimizer: Optimizers = None) -> Loaded:
    """Load the newest checkpoint of a run; where that is refused, the one before. Collective.

    The refused ones are then set aside, under names that begin with "refused-": the run will come by there again.
    Raises CheckpointError on all ranks where there are some and every one is refused: whoever wants to begin anew
    names another folder.
    """
    refused: list[str] = []
    steps = on_rank_0(lambda: saved_steps(run))
    for step in steps:
        try:
            notes = load(at_step(run, step), model, optimizer)
        except CheckpointError as error:
            refused.append(str(error))
            continue
        on_rank_0(lambda: _set_aside(run, steps[: len(refused)]))
        return Loaded(step, notes, refused)
    if refused:
        more = f", and {len(refused) - 1} older ones likewise" if len(refused) > 1 else ""
        raise CheckpointError(f"{refused[0].rstrip('.')}{more}.")
    return Loaded(0, {}, [])


def prune(run: str | Path, count: int) -> None:
    """Remove all but the newest `count` checkpoints of a run, and what a killed save has left behind them.

    To be called by one rank; a save of a later step may be under way. Raises ValueError, and removes nothing, for what
    is no whole number.
    """
    check_count("count", count, 0)
    folder, steps = place(run), saved_steps(run)
    for left in folder.glob(f"{REMOVED}*"):  # by who was killed while removing
        shutil.rmtree(left, ignore_errors=True)
    for begin in (UNFINISHED, LOCK):  # by who was killed while saving, but by no one who is saving yet
        for left in folder.glob(f"{begin}step-*"):
            found = NAME.match(left.name.removeprefix(begin))
            if found and steps and int(found[1]) < steps[0] and is_free(folder / f"{LOCK}{found[0]}"):
                shutil.rmtree(left, ignore_errors=True)
    for step in steps[count:]:
        removed = at_step(run, step).rename(folder / f"{REMOVED}{step:06d}")
        shutil.rmtree(removed, ignore_errors=True)


def _set_aside(run: str | Path, steps: Sequence[int]) -> None:
    folder = place(run)
    for step in steps:
        name = f"refused-{at_step(run, step).name}"
        number = 1 + len(list(folder.glob(f"{name}*")))
        at_step(run, step).rename(folder / (name if number == 1 else f"{name}-{number}"))
