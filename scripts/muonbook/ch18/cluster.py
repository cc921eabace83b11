"""One training on several machines: started by torchrun on each, kept going by a loop on each.

What a user types on every machine is the same command, but for what only this small cluster needs: short patience.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from distmuon.extras.checkpoint import runs
from distmuon.launch import WorldError
from muonbook import processes
from muonbook.ch18.drills.faults import HELD, PROGRAM, RELEASED
from muonbook.ch18.drills.harness import SMALL, words_of
from muonbook.ch18.machines import Machine

SCRIPTS = Path(__file__).resolve().parents[2]
PATIENCE = 1800.0  # seconds that anything may take here, on a machine that has ten times as much to do
LINGER, TIMEOUT = 3, 5.0  # seconds that a command may stay on without a rank; that a collective waits
GONE_ON = re.compile(r"^step +(\d+) +gone on from", re.M)


class Cluster:
    """Machines with a shared file system, on which one training runs. folder: for the run, and what machines print.

    ranks: of each machine. nodes: how many machines torchrun wants, "2", or at least and at most, "1:2". timeout:
    seconds that a collective waits. apart: whether the machines have networks of their own. tp: the degree of TP, which
    stays inside a machine.
    """

    def __init__(
        self, folder: Path, machines: int = 2, ranks: int = 2, nodes: str = "", steps: int = 60, every: int = 10,
        timeout: float = TIMEOUT, apart: bool = True, tp: int = 1,
    ) -> None:  # fmt: skip
        self.folder, self.run, self.steps, self.every = folder, folder / "run", steps, every
        self.run.mkdir(parents=True, exist_ok=True)
        self.machines = [Machine(number, apart) for number in range(1, machines + 1)]
        self.nodes, self.ranks, self.timeout, self.apart, self.tp = nodes or str(machines), ranks, timeout, apart, tp
        self.port = 29500 if apart else _free_port()
        self.holds: list[int] = []

    def settings(self) -> dict[str, object]:
        """Return the options of train.py, as both its command line and RunSettings have them."""
        return {**SMALL, "batch": 12, "steps": self.steps, "save_every": self.every, "folder": str(self.run)}

    def command(self, machine: Machine) -> list[str]:
        """Return what runs on a machine."""
        words = [sys.executable, str(SCRIPTS / "keep_going.py"), "--name", machine.name, "--progress", str(self.run)]
        words += ["--until", str(runs.at_step(self.run, self.steps)), "--linger", str(LINGER), "--tries", "20", "--"]
        words += [sys.executable, "-m", "torch.distributed.run", "--nnodes", self.nodes, "--max-restarts", "0"]
        words += ["--nproc-per-node", str(self.ranks), "--monitor-interval", "0.2", "--rdzv-backend", "c10d"]
        patience = "join_timeout=600,read_timeout=10,last_call_timeout=8"
        if self.apart:  # each has a name that the others know: torchrun finds out by itself whose address is the host's
            words += ["--rdzv-endpoint", f"a:{self.port}", "--rdzv-conf", patience]
        else:
            words += ["--rdzv-endpoint", f"{machine.address}:{self.port}", "--local-addr", machine.address]
            words += ["--rdzv-conf", f"{patience},is_host={int(machine.number == 1)}"]
        words += ["--rdzv-id", "training", "-m", PROGRAM, "--timeout", str(self.timeout), "--tp", str(self.tp)]
        return words + words_of(self.settings())

    def start(self, *machines: Machine) -> None:
        """Start the loop on these machines, or on all."""
        for machine in machines or self.machines:
            log, temporary = self.folder / f"{machine.name}.txt", self.folder / f"tmp-{machine.name}"
            temporary.mkdir(exist_ok=True)  # a machine that loses its power removes none of its files
            holds = ",".join(f"hold step {step} 0" for step in self.holds)
            machine.start(self.command(machine), log, FAULTS=holds, TMPDIR=str(temporary))

    # ---- What is going on -----------------------------------------------------------------------------

    def said(self, machine: Machine) -> str:
        """Return what a machine has printed so far."""
        log = self.folder / f"{machine.name}.txt"
        return log.read_text(errors="replace") if log.exists() else ""

    def gone_on_from(self) -> list[int]:
        """Return from which steps the training was gone on with, in this order; rank 0 says it, wherever it lives."""
        return [int(step) for machine in self.machines for step in GONE_ON.findall(self.said(machine))]

    def agent(self, machine: Machine) -> int:
        """Return the process id of a machine's torchrun."""
        (agent,) = processes.children(machine.command_pid)
        return agent

    def ranks_of(self, machine: Machine) -> list[int]:
        """Return the process ids of a machine's ranks, in the order in which they were started."""
        return processes.children(self.agent(machine))

    # ---- Waiting --------------------------------------------------------------------------------------

    def wait_until_held(self, step: int) -> None:
        """Wait until rank 0 is about to make this step, one of `holds`, and everything before it is saved."""
        self.wait((self.folder / HELD.format(step)).exists, f"step {step}")
        self.wait(lambda: not list(self.run.glob(".unfinished-*")), f"what is saved before step {step}")

    def release(self, step: int) -> None:
        """Let rank 0 go on."""
        (self.folder / RELEASED.format(step)).touch()

    def starts_again(self, machine: Machine) -> int:
        """Return how often a machine has said that it starts its command again."""
        return self.said(machine).count("; starting again.")

    def wait(self, true: Callable[[], object], what: str) -> None:
        """Wait until `true()`. Raises WorldError, with what the machines have said, when that takes too long."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            if time.monotonic() > deadline:
                said = "\n".join(f"---- {m.name}\n{self.said(m)[-3000:]}" for m in self.machines)
                raise WorldError(f"waited {PATIENCE:g} s for {what} in vain.\n{said}", None)
            time.sleep(0.05)

    def wait_for_end(self, *machines: Machine) -> list[int]:
        """Return the exit codes of these machines' loops, or of all, once they have ended."""
        chosen = machines or self.machines
        self.wait(lambda: all(m.process and m.process.poll() is not None for m in chosen), "the end")
        return [machine.wait(0) for machine in chosen]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.remove()


def _free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
