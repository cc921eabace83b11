"""A worker for tests of being asked to stop: ranks that heed the note, that do not, or that fail while they save."""

from __future__ import annotations

import argparse
import time

import worlds

from distmuon import launch
from distmuon.launch import session


def work(world: launch.World, what: str) -> str:
    world.report("working")
    while not world.asked_to_stop():
        time.sleep(0.01)
    if what == "fail" and world.rank == 0:
        raise OSError("no space left on this device")
    if what == "slow":
        time.sleep(1000)
    time.sleep(0.5)  # what saving takes
    return f"rank {world.rank} has saved"


def main() -> int:
    session.PRELOAD[:] = worlds.WITHOUT_OPTIMIZERS
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("--stop-within", type=float, default=30.0)
    launch.add_arguments(parser, dp=2, tp=1)
    arguments = parser.parse_args()
    found = launch.run(work, (arguments.what,), **launch.options(arguments), stop_within=arguments.stop_within)
    if launch.is_main_process():
        print("\n".join(found))
    return 0


if __name__ == "__main__":
    launch.command(main)
