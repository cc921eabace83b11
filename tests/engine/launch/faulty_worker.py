"""A worker for tests: it waits, or does what its first argument says, and is started like every other worker."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import worlds

from distmuon import launch
from distmuon.launch import session, supervise

WITHOUT_TORCH = ("idle", "between")


@dataclass
class Answer:
    """A result whose class lives in the worker's own file, which no other process can import by name."""

    rank: int
    total: int


def greet(world: launch.World) -> Answer:
    known = worlds.who(world)  # first: a rank that leaves while others still connect makes gloo complain
    world.say("hello from one rank")
    world.report(f"rank {world.rank} of {known['world'].size}")
    return Answer(world.rank, known["total"])


def count(world: launch.World) -> Answer:
    return Answer(world.rank, worlds.who(world)["total"])


def report(answer: Answer, seconds: float) -> None:
    print(f"rank {answer.rank} counts {answer.total}", flush=bool(seconds))
    time.sleep(seconds)


def wait(world: launch.World) -> None:
    """Let the last rank stay away from a collective that blocks the others."""
    import torch
    import torch.distributed as dist

    world.report("waiting")
    if world.rank == world.size - 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(3))


def idle(rank: int, directory: str, seconds: float) -> None:
    with open(os.path.join(directory, f"ready-{rank}"), "w"):
        pass
    while len([name for name in os.listdir(directory) if name.startswith("ready-")]) < 2:
        time.sleep(0.01)
    if rank == 0 and seconds:
        print("waiting", flush=True)
    time.sleep(seconds)


def until_asked(world: launch.World, what: str) -> str:
    """Work until asked to stop; then save, need too long for it, or fail."""
    world.report("working")
    while not world.asked_to_stop():
        time.sleep(0.01)
    if what == "fail" and world.rank == 0:
        raise OSError("no space left on this device")
    time.sleep(1000 if what == "slow" else 0.5)  # what saving takes
    return f"rank {world.rank} has saved"


def main() -> int:
    session.PRELOAD[:] = worlds.WITHOUT_OPTIMIZERS
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("--culprit", type=int, default=1)
    parser.add_argument("--stop-within", type=float, default=30.0)
    launch.add_arguments(parser, dp=2, tp=1)
    arguments = parser.parse_args()
    options: dict[str, Any] = launch.options(arguments)
    if arguments.what in WITHOUT_TORCH:  # a fork server that imports nothing: these commands start in no time
        session.PRELOAD.clear()
        supervise.run_local(idle, (0 if arguments.what == "between" else 1000,), 2, "forkserver", 60)
        print("waiting", flush=True)  # "between": no rank is alive, the fork server is
        time.sleep(1000)
    elif arguments.what == "greet":
        for answer in launch.run(greet, **options):
            print(answer)
    elif arguments.what in ("tell", "dwell"):
        launch.run(count, on_rank0_result=(report, (1000 if arguments.what == "dwell" else 0,)), **options)
    elif arguments.what == "wait":
        launch.run(wait, **options)
    elif arguments.what in ("heed", "slow", "fail"):
        print("\n".join(launch.run(until_asked, (arguments.what,), **options, stop_within=arguments.stop_within)))
    elif arguments.what == "imports":
        try:
            launch.run(greet, **options)
        finally:
            print("torch imported:", "torch" in sys.modules)
    else:
        launch.run(worlds.misbehave, (arguments.what, (arguments.culprit,)), **options)
    return 0


if __name__ == "__main__":
    launch.command(main)
