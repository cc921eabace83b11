"""train.py with something going wrong in it: the same loop, in which a rank misbehaves at a given step and place.

    launch.run(train_until_it_happens, (settings, [Fault("kill", "gradients", 7, 1)], log), dp=2)
    FAULTS="hold step 14 0" torchrun ... -m muonbook.ch18.drills.faults ...      # the same as a program

Nothing in train.py or the engine knows of this: functions that they call are wrapped here, in the rank's own process.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import train

from distmuon import launch
from distmuon.extras.checkpoint import runs, storage
from distmuon.launch import session
from distmuon.models.run_settings import RunSettings

PROGRAM = "muonbook.ch18.drills.faults"
JOB = f"{PROGRAM}:train_until_it_happens"
LOOP = train.train
ACTED = "acted"  # a file beside the run: when (time.monotonic, one clock for all processes) somebody has misbehaved
HELD, RELEASED = "held-at-{}", "released-at-{}"  # files beside the run: a rank waits in this step; it may go on
MEASURED = "measured"  # a file beside the run: memory and open files of a rank, a line for every step
WRITING = {"write_data": "write", "finish": "manifest", "publish": "rename"}  # of ManifestWriter: the place before it
PLACES = ("build", "resume", "step", "loss", "gradients", "agree", "update", "updated", "evaluate", "save", "remove")


class Footprint(NamedTuple):
    """What a process holds of the machine. memory: MB that stand for no file. files: open ones, sockets among them."""

    memory: float
    files: int

    @staticmethod
    def of(pid: int | str) -> Footprint:
        """Return what a running process holds; pages of files, such as those of torch's code, are left out."""
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        private = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
        return Footprint(private / (1 << 20), len(os.listdir(f"/proc/{pid}/fd")))


class Fault(NamedTuple):
    """What ranks do at a place (of `PLACES` and `WRITING`) of steps. step: None: any. rank: None: all. last: of several
    steps that begin with `step`."""

    act: str
    place: str
    step: int | None = None
    rank: int | None = None
    last: int | None = None

    def meets(self, place: str, step: int | None, rank: int) -> bool:
        if place != self.place or self.rank not in (None, rank):
            return False
        return self.step is None or (step is not None and self.step <= step <= (self.last or self.step))


def train_until_it_happens(
    world: launch.World, settings: RunSettings, faults: Sequence[Fault], log: str | None = None
) -> Any:
    """Run the loop of train.py on this rank. log: the file into which it prints, instead of onto the terminal."""
    assert world.size > 1, "a single rank would wrap, and silence, the process that has started it"
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(file, stream)
    assert settings.folder is not None
    install(world.rank, faults, Path(settings.folder))
    return LOOP(world, settings)


# ---- Places -----------------------------------------------------------------------------------------------


def install(rank: int, faults: Sequence[Fault], run: Path) -> None:
    """Let this rank's faults happen: wrap what train.py calls in each step, and what saving calls.

    Saving is waited for: how many steps were made meanwhile would be a matter of luck.
    """
    now = SimpleNamespace(step=None)
    hooked: Any = train

    def reach(place: str, step: int | None) -> None:
        for fault in faults:
            if fault.meets(place, step, rank):
                (run.parent / ACTED).write_text(str(time.monotonic()))
                ACTS[fault.act](run, rank, step)

    def reach_writing(place: str, writer: Any, *_: Any) -> None:
        reach(place, int(writer.target.name.removeprefix("step-")))

    def backward(true: Any, world: Any, settings: Any, text: Any, forward: Any, optimizer: Any, step: int) -> Any:
        now.step = step
        reach("step", step)
        broken = any(fault.act == "nan" and fault.meets("loss", step, rank) for fault in faults)
        found = true(world, settings, text, _not_a_number(forward) if broken else forward, optimizer, step)
        reach("gradients", step)
        return found

    def optimizer_of(true: Any, *arguments: Any) -> Any:
        optimizer = true(*arguments)
        optimizer.register_step_pre_hook(lambda *_: reach("update", now.step))
        optimizer.register_step_post_hook(lambda *_: reach("updated", now.step))
        return optimizer

    def save(true: Any, *arguments: Any) -> Any:
        reach("save", now.step)
        saving = true(*arguments)
        saving.exception()
        return saving

    for inner in (backward, optimizer_of, save):
        setattr(hooked, inner.__name__, functools.partial(inner, getattr(train, inner.__name__)))
    for name in ("build", "resume", "agree", "evaluate"):
        setattr(hooked, name, _after(lambda *_, name=name: reach(name, now.step), getattr(train, name)))
    for name, place in WRITING.items():
        before = functools.partial(reach_writing, place)
        setattr(storage.ManifestWriter, name, _after(before, getattr(storage.ManifestWriter, name)))

    def reach_removing(*_: Any) -> None:
        while not runs.at_step(run, now.step).exists():  # it is being saved meanwhile
            time.sleep(0.01)
        reach("remove", now.step)

    hooked = runs
    hooked.shutil = SimpleNamespace(rmtree=_after(reach_removing, runs.shutil.rmtree))


def _after(first: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any, **options: Any) -> Any:
        first(*arguments)
        return function(*arguments, **options)

    return both


def _not_a_number(forward: Any) -> Any:
    return lambda *batch: forward(*batch) * float("nan")


# ---- Acts -------------------------------------------------------------------------------------------------


def _starve(run: Path, rank: int, step: int | None) -> None:
    """Ask for more memory than this rank may have."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.ones(limit)


def _raise(run: Path, rank: int, step: int | None) -> None:
    raise IndexError(f"rank {rank} has a bug")


def _oversleep(run: Path, rank: int, step: int | None) -> None:
    time.sleep(1000)


def _hold(run: Path, rank: int, step: int | None) -> None:
    """Wait until somebody lets this step go on, once for all starts, or until this rank is asked to stop."""
    released = run.parent / RELEASED.format(step)
    (run.parent / HELD.format(step)).touch()
    while not released.exists() and not session.stop_code():
        time.sleep(0.02)


def _fill_disk(run: Path, rank: int, step: int | None) -> None:
    """Let what this rank writes now go to a device on which no space is left."""
    (unfinished,) = run.glob(".unfinished-*")
    (unfinished / f"__{rank}_0.distcp").symlink_to("/dev/full")


def _measure(run: Path, rank: int, step: int | None) -> None:
    """Write down what this rank holds."""
    with open(run.parent / MEASURED, "a") as file:
        held = Footprint.of("self")
        print(held.memory, held.files - 1, file=file)  # but for this one


ACTS: dict[str, Callable[[Path, int, int | None], Any]] = {  # each with the run's folder, the rank and the step
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "leave": lambda *_: os._exit(0),
    "stop": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
    "dawdle": lambda *_: time.sleep(0.5),
    "oversleep": _oversleep,
    "ask": lambda *_: session.note_stop(signal.SIGTERM),
    "raise": _raise,
    "starve": _starve,
    "hold": _hold,
    "measure": _measure,
    "fill disk": _fill_disk,
}


# ---- As a program -----------------------------------------------------------------------------------------


def main() -> int:
    """Be train.py, in which the faults happen that the environment names: act, place, step and rank of each."""
    words = [fault.split() for fault in os.environ["FAULTS"].split(",")]
    faults = [Fault(act, place, int(step), int(rank)) for act, place, step, rank in words]
    hooked: Any = train
    hooked.train = functools.partial(train_until_it_happens, faults=faults)
    return train.main()


if __name__ == "__main__":
    launch.command(main)
