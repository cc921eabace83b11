"""A long training in which ranks are killed: it must end where the undisturbed one ends, and leak nothing.

The loop that starts it again lives in one process throughout, as `keep_going.py` does on a machine; so do the processes
that ranks are forked from. What grows there with every start would show; what grows with every step shows in a rank
of the undisturbed run, which is as long.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from distmuon import launch
from distmuon.extras.checkpoint import runs
from distmuon.launch import WorldError, session
from distmuon.models.run_settings import RunSettings
from muonbook import processes
from muonbook.ch18 import checkpoint_contents
from muonbook.ch18.drills.faults import JOB, MEASURED, Fault, Footprint
from muonbook.ch18.drills.harness import PATIENT, SAME, SMALL

PLACES = ("step", "gradients", "agree", "update", "updated")  # where a rank may be killed
SETTLED = 0.2  # of the starts, or of the steps, after which nothing may grow any more
GROWTH = 1.05  # of memory, at most: what an allocator keeps varies


class Soak(NamedTuple):
    """A soak: one rank is killed in every `every` steps but the last, somewhere. save: steps between checkpoints."""

    steps: int = 2000
    ranks: int = 8
    every: int = 100
    save: int = 20
    seed: int = 0

    def kills(self) -> list[Fault]:
        draw = random.Random(self.seed)
        return [
            Fault("kill", draw.choice(PLACES), begin + draw.randrange(2, self.every), draw.randrange(self.ranks))
            for begin in range(0, self.steps - self.every, self.every)
        ]

    def settings(self, folder: Path) -> RunSettings:
        run = {
            **SMALL,
            "batch": self.ranks,
            "steps": self.steps,
            "save_every": self.save,
            "folder": str(folder / "run"),
        }
        rarely = {"log_every": max(1, self.steps // 50), "evaluate_every": self.steps}
        return RunSettings(**{**run, **rarely})  # type: ignore[arg-type]


def soak(plan: Soak) -> dict[str, Any]:
    """Train undisturbed, then with kills; return what came of it.

    Raises WorldError where the ends differ, a kill was not seen for what it was, or something has grown.
    """
    with tempfile.TemporaryDirectory(prefix="soak-", dir=session.directory()) as home:
        calm, rough = Path(home) / "calm", Path(home) / "rough"
        _start(plan, calm, (Fault("measure", "step", None, 0),))
        settling = max(int(SETTLED * plan.steps), 2 * plan.save)  # saving in the background opens a group of its own
        measured = [line.split() for line in (calm / MEASURED).read_text().splitlines()]
        in_rank = [Footprint(float(memory), int(files)) for memory, files in measured]
        kills, lost, here, server = plan.kills(), 0, [], []
        for kill in kills:
            lost += _killed(plan, rough, kill)
            gc.collect()  # what only waits for the collector is not lost
            here.append(Footprint.of("self"))
            server.append(Footprint.of(_fork_server()))
        _start(plan, rough)
        if not checkpoint_contents.same_end(rough / "run", calm / "run"):
            raise WorldError(f"the end after {len(kills)} kills is not the undisturbed one.", None)
        first = int(SETTLED * len(kills))
        grown = {
            "a rank, from step to step": in_rank[settling:],
            "the launcher, from start to start": here[first:],
            "the fork server, from start to start": server[first:],
        }
        loss = checkpoint_contents.last_loss(rough / "run")
    return {
        "plan": plan._asdict(), "kills": [f"rank {k.rank}, step {k.step}, before {k.place}" for k in kills],
        "lost": lost, "loss": loss, "end": SAME,
        "growth": {name: _growth(name, found) for name, found in grown.items()},
    }  # fmt: skip


def _start(plan: Soak, folder: Path, faults: tuple[Fault, ...] = ()) -> int:
    """Start the training, or go on with it; return the last step it has made."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    job = (plan.settings(folder), faults, str(folder / "log"))
    ended, *_ = launch.run(JOB, job, dp=plan.ranks, timeout=PATIENT)
    return ended.step


def _killed(plan: Soak, folder: Path, kill: Fault) -> int:
    """Go on until a rank is killed; return how many steps are lost by it."""
    try:
        _start(plan, folder, (kill,))
    except WorldError as error:
        if error.rank != kill.rank or "was killed by SIGKILL" not in str(error):
            raise
    else:
        raise WorldError(f"nobody has seen that rank {kill.rank} was killed.", None)
    assert kill.step is not None
    saved = runs.saved_steps(folder / "run")
    return kill.step - 1 - (saved[0] if saved else 0)


def _fork_server() -> int:
    """Return the process that ranks are forked from."""
    (server,) = (pid for pid in processes.children(os.getpid()) if "forkserver" in _words_of(pid))
    return server


def _words_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def _growth(name: str, found: list[Footprint]) -> dict[str, Any]:
    """Return what a process held first and last. Raises WorldError where it has grown."""
    first, last = found[0], found[-1]
    if last.files > first.files or last.memory > GROWTH * first.memory:
        raise WorldError(f"{name}: from {first} to {last}; something is not given back.", None)
    return {"first": first._asdict(), "last": last._asdict()}
