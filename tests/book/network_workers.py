"""A worker for test_network_emulation.py: a world whose ranks have networks of their own."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from typing import Any

import worlds

from distmuon import launch
from distmuon.launch import session
from muonbook import network_emulation

MB = 1 << 20


def resent_segments() -> int:
    """Return how many TCP segments this network has sent again."""
    with open("/proc/thread-self/net/snmp") as table:
        names, values = (line.split() for line in table if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def count(world: launch.World) -> list[Any] | None:
    """Let every rank gather 4 MB of float32; return what it found.

    What left its interface, how many segments of it again, the ledger's bytes, every interface it sees, and its limits.
    """
    import torch
    import torch.distributed as dist

    from distmuon.sharding.grid import Grid

    grid = Grid.of(world)
    shard = torch.ones(MB // world.size)
    grid.world.all_gather(shard, "first")
    grid.ledger.clear()
    dist.barrier()
    time.sleep(0.3)
    before, resent = network_emulation.sent(), resent_segments()
    grid.world.all_gather(shard, "second")
    dist.barrier()
    time.sleep(0.3)
    found, resent = network_emulation.sent().since(before), resent_segments() - resent
    with open("/proc/thread-self/net/dev") as table:
        interfaces = [line.partition(":")[0].strip() for line in table if ":" in line]
    limits = subprocess.run(
        ["tc", "-s", "qdisc", "show", "dev", network_emulation.INTERFACE], capture_output=True, text=True
    ).stdout
    return world.gather((found, resent, grid.ledger.total().sent_bytes, interfaces, limits))


def wait(world: launch.World, how: str) -> None:
    """Say where this rank lives, and wait for the last rank, which dies or oversleeps."""
    import torch
    import torch.distributed as dist

    world.report(os.readlink("/proc/thread-self/ns/net"))
    world.say("waiting")
    if world.rank == world.size - 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        worlds.oversleep()
    dist.all_reduce(torch.ones(3))


def main() -> int:
    session.PRELOAD[:] = worlds.WITHOUT_OPTIMIZERS
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("--rate", type=float)
    launch.add_arguments(parser, dp=2, tp=1)
    arguments = parser.parse_args()
    options: dict[str, Any] = launch.options(arguments)
    if arguments.what != "unplugged":
        network_emulation.setup_bridge()
    link = network_emulation.Link(arguments.rate)
    if arguments.what in ("kill", "sleep"):
        network_emulation.run(wait, (arguments.what,), link=link, **options)
        return 0
    for _ in range(2):  # a second world meets at the same switch
        rows = network_emulation.run(count, link=link, **options)[0]
    for found, resent, ledger, interfaces, limits in rows:
        overlimits = limits.partition("overlimits ")[2].split()
        print(
            found.payload, resent, ledger, ",".join(interfaces), "tbf" in limits, overlimits[0] if overlimits else "0"
        )
    return 0


if __name__ == "__main__":
    launch.command(main)
