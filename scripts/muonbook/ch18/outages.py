"""What may happen to machines while they train, what each of them then says, and how training goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from distmuon import launch
from distmuon.launch import WorldError
from distmuon.models.run_settings import RunSettings
from muonbook.ch18.cluster import Cluster
from muonbook.ch18.drills.faults import JOB, Fault

EVERY, HELD_AFTER = 10, 4  # steps between checkpoints; after so many steps more it happens
# The second is an echo: of a neighbour that gave up first.
SILENT = (r"Timed out waiting \d+ms", "Connection closed by peer")


class Outage(NamedTuple):
    """happens: to the cluster, in the middle of a step. passes: once it was noticed. notices: the machine that says
    something, and what, as patterns, the most telling first. late: whether that takes the timeout."""

    done: str
    happens: Callable[[Cluster], object]
    passes: Callable[[Cluster], object]
    notices: str
    says: tuple[str, ...]
    late: bool


def _nothing(_: Cluster) -> None: ...


OUTAGES = {
    "a rank of another machine is killed": Outage(
        "a rank of b is killed",
        lambda c: os.kill(c.ranks_of(c.machines[1])[-1], signal.SIGKILL),
        _nothing, "b", (r"rank \d was killed by SIGKILL",), False,
    ),
    "an agent is killed": Outage(
        "torchrun on b is killed",
        lambda c: os.kill(c.agent(c.machines[1]), signal.SIGKILL),
        _nothing, "b", ("the command was killed by SIGKILL",), False,
    ),
    "the agent at which all meet is killed": Outage(
        "torchrun on a is killed, at whose address all meet",
        lambda c: os.kill(c.agent(c.machines[0]), signal.SIGKILL),
        _nothing, "a", ("the command was killed by SIGKILL",), False,
    ),
    "a rank of another machine is stopped": Outage(
        "a rank of b is stopped (SIGSTOP)",
        lambda c: os.kill(c.ranks_of(c.machines[1])[0], signal.SIGSTOP),
        _nothing, "a", SILENT, True,
    ),
    "a cable is pulled": Outage(
        "the cable of b is pulled, and put back later",
        lambda c: c.machines[1].cut(), lambda c: c.machines[1].mend(), "a", SILENT, True,
    ),
    "a machine loses its power": Outage(
        "b is switched off, and on again later",
        lambda c: c.machines[1].kill(), lambda c: c.start(c.machines[1]), "a", SILENT, True,
    ),
    "the machine at which all meet loses its power": Outage(
        "a is switched off, and on again later",
        lambda c: c.machines[0].kill(), lambda c: c.start(c.machines[0]), "b", SILENT, True,
    ),
}  # fmt: skip


class Passed(NamedTuple):
    """What came of an outage. seen: words of a machine. step: in the middle of which it happened. lost: steps. after:
    timeouts until a machine said so."""

    name: str
    outage: Outage
    seen: str
    step: int
    lost: int
    after: float


def prepare(cluster: Cluster, count: int) -> None:
    """Let the training be long enough for so many outages, one after each checkpoint."""
    cluster.holds = [EVERY * (number + 1) + HELD_AFTER for number in range(count)]
    cluster.steps, cluster.every = EVERY * (count + 2), EVERY


def go_through(cluster: Cluster, names: list[str]) -> Iterator[Passed]:
    """Let one thing after the other happen to a cluster that has been prepared and started; yield what came of each."""
    for name, step in zip(names, cluster.holds, strict=True):
        outage = OUTAGES[name]
        (who,) = (machine for machine in cluster.machines if machine.name == outage.notices)
        cluster.wait_until_held(step)
        starts, said, gone_on = cluster.starts_again(who), len(cluster.said(who)), len(cluster.gone_on_from())
        happened = time.monotonic()
        outage.happens(cluster)
        if outage.late:  # only in a collective is it found out
            cluster.release(step)
        cluster.wait(lambda: cluster.starts_again(who) > starts, f"what {who.name} says of it: {name}")  # noqa: B023
        after = (time.monotonic() - happened) / cluster.timeout
        if not outage.late:  # before that, ranks that have lost their agent might still reach a checkpoint
            cluster.release(step)
        outage.passes(cluster)
        cluster.wait(lambda: len(cluster.gone_on_from()) > gone_on, f"going on after {name}")  # noqa: B023
        lost = step - 1 - max(cluster.gone_on_from())
        yield Passed(name, outage, most_telling(outage, cluster.said(who)[said:]), step, lost, after)


def most_telling(outage: Outage, said: str) -> str:
    """Return which of its words a machine said. Raises WorldError where it said none of them."""
    for pattern in outage.says:
        if found := re.search(pattern, said):
            return found[0]
    raise WorldError(f"{outage.notices} says none of {outage.says}:\n{said}", None)


# ---- Fewer machines ---------------------------------------------------------------------------------------

LEAVES, RETURNS = EVERY + HELD_AFTER, 2 * EVERY + HELD_AFTER  # steps in which b goes, and in which it is back


def prepare_for_fewer(cluster: Cluster) -> None:
    cluster.holds, cluster.steps, cluster.every = [LEAVES, RETURNS], 4 * EVERY, EVERY


def with_fewer(cluster: Cluster) -> Iterator[int]:
    """Let b lose its power and come back much later; yield from which step the others go on, then from which all do."""
    b = cluster.machines[1]
    cluster.wait_until_held(LEAVES)
    b.kill()
    cluster.release(LEAVES)
    cluster.wait(lambda: cluster.gone_on_from(), "going on without b")
    yield max(cluster.gone_on_from())
    cluster.wait_until_held(RETURNS)
    cluster.start(b)
    cluster.wait(lambda: len(cluster.gone_on_from()) > 1, "going on with b")
    yield max(cluster.gone_on_from())


# ---- The same on one machine ------------------------------------------------------------------------------


def undisturbed(cluster: Cluster, folder: Path) -> Path:
    """Run the cluster's training on this machine, with as many ranks, and nothing happens; return the run's folder."""
    return _stages(cluster, folder, [(len(cluster.machines), ())])


def with_fewer_undisturbed(cluster: Cluster, folder: Path) -> Path:
    """Run on this machine what `with_fewer` comes to: the same number of ranks between the same steps."""
    lost, asked = Fault("kill", "step", LEAVES, 0), Fault("ask", "step", RETURNS, 0)
    return _stages(cluster, folder, [(2, (lost,)), (1, (asked,)), (2, ())])


def _stages(cluster: Cluster, folder: Path, stages: list[tuple[int, tuple[Fault, ...]]]) -> Path:
    """Start the training once for each (machines that it is worth, what happens)."""
    run = folder / "run"
    run.mkdir(parents=True)
    settings = RunSettings(**{**cluster.settings(), "folder": str(run)})  # type: ignore[arg-type]
    for machines, faults in stages:
        with contextlib.suppress(WorldError):  # of the rank that was to be lost
            job = (settings, faults, str(folder / "log"))
            launch.run(JOB, job, dp=machines * cluster.ranks // cluster.tp, tp=cluster.tp)
    return run
