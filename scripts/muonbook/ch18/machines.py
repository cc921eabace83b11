"""Machines to try a cluster on, all inside this one: each with a name, a network, and processes that see no others.

    network_emulation.setup_bridge()
    a, b = Machine(1, "a"), Machine(2, "b")
    a.start(command, log); b.start(command, log)
    b.cut()      # pull its cable; mend() puts it back
    b.kill()     # as if somebody had pulled its plug: whatever runs on it is gone at once, without a word to anybody
    b.start(command, log)

A machine is made of Linux namespaces, of the network, of processes, of names and of mounts, that belong to the
processes inside: the kernel removes them with the last one, whoever dies of what. All machines share the file system,
as those of a cluster do. Its names for each other stand in /etc/hosts of each, because looking up an address without
a server takes some 5 s per connection.

Where namespaces are not permitted, `apart=False` makes machines in name only: they share one network and all else. One
that must fall silent is stopped (SIGSTOP) instead: it answers nothing, and its connections stay open.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from muonbook import network_emulation, processes

NAMES, ADDRESS = "abc", "10.0.0.{}"
HOSTS = "127.0.0.1 localhost\n" + "".join(f"{ADDRESS.format(i)} {name}\n" for i, name in enumerate(NAMES, 1))
INSIDE = """
mount --bind "$1" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
echo "$0" >/proc/sys/kernel/hostname
shift
exec "$@"
"""


class Machine:
    """One machine, which runs one command at a time. number: from 1, the last part of its address. apart: really."""

    def __init__(self, number: int, apart: bool = True) -> None:
        self.number, self.name, self.apart = number, NAMES[number - 1], apart
        self.process: subprocess.Popen[bytes] | None = None
        self.frozen = False  # whether what ran on it when it lost its power is still there, stopped

    @property
    def address(self) -> str:
        return ADDRESS.format(self.number) if self.apart else "127.0.0.1"

    def start(self, command: Sequence[str], log: Path, **variables: str) -> None:
        """Boot, and run the command; what it prints is added to the file `log`, beside which stands /etc/hosts.

        variables: of the environment.
        """
        assert self.process is None or self.frozen or self.process.poll() is not None, f"{self.name} is running"
        self._clear()
        program = "from muonbook.ch18 import machines; machines.boot()"
        if not (table := log.with_name("hosts")).exists():
            table.write_text(HOSTS)
        booting = [sys.executable, "-c", program, str(self.number), str(table), *command]
        words = booting if self.apart else list(command)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), **variables}
        if not self.apart:
            environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True,
                preexec_fn=processes.end_with_parent,
            )  # fmt: skip

    def cut(self) -> None:
        """Pull the cable: what is sent is lost, and nobody is told."""
        assert self.process
        if self.apart:
            network_emulation.link_down(self.process.pid)
        else:
            self._send(signal.SIGSTOP)

    def mend(self) -> None:
        """Put the cable back."""
        assert self.process
        if self.apart:
            network_emulation.link_up(self.process.pid)
        else:
            self._send(signal.SIGCONT)

    def kill(self) -> None:
        """Pull the plug. The cable comes first, or the kernel would still tell the others that connections close."""
        assert self.process
        if self.process.poll() is None:
            self.cut()
        self.frozen = not self.apart  # were its processes to go, their connections would close
        if not self.frozen:
            self._clear()

    def _clear(self) -> None:
        """Remove whatever runs on it."""
        if self.process is not None and self.process.poll() is None:
            self._send(signal.SIGKILL)
            self.process.wait()
        self.frozen = False

    def _send(self, number: int) -> None:
        """Send a signal to every process that runs on it."""
        assert self.process
        for pid in (self.process.pid, *processes.descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):  # gone with the machine
                os.kill(pid, number)

    @property
    def command_pid(self) -> int:
        """The command's process id, as the machine that all of them are in has it."""
        assert self.process
        return processes.children(self.process.pid)[0] if self.apart else self.process.pid

    def wait(self, seconds: float) -> int:
        """Return the command's exit code. Raises subprocess.TimeoutExpired."""
        assert self.process
        return self.process.wait(seconds)

    def remove(self) -> None:
        """Kill what runs on it, as if somebody had pulled its plug, and leave nothing behind."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self._clear()


def boot() -> None:
    """Become a machine, and run a command as its first process: what `Machine.start` runs, in a process of its own."""
    number, table, *command = sys.argv[1:]
    network_emulation.attach(network_emulation.Link(), ADDRESS.format(number))
    own = ["--uts", "--pid", "--mount-proc", "--fork", "--kill-child"]
    os.execvp("unshare", ["unshare", *own, "sh", "-c", INSIDE, NAMES[int(number) - 1], table, *command])
