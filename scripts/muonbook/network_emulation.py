"""Several hosts on one machine: every local rank gets a network interface of its own, and all meet at one switch.

    network_emulation.setup_bridge()                                      # in the command, before anything is started
    network_emulation.run(work, dp=4, link=network_emulation.Link(rate_mbit=100))   # and in `work`: .sent()

A rank then lives in a network namespace that holds nothing but `eth0`, one end of a veth pair whose other end is a port
of the bridge in the command's own namespace. So the operating system counts what each rank really sends, headers and
all, and a token bucket (tc-tbf) at both ends of the cable makes the link as slow as one asks for. Namespaces, cables
and bridge belong to the processes inside: the kernel removes them with the last one, whoever dies of what.

Linux only, with `ip` and `tc` (iproute2); root, or the right to create user namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from distmuon import launch
from distmuon.launch import UsageError

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
SWITCH, INTERFACE = "distmuon0", "eth0"
LARGEST_PACKET = 70_000  # bytes: 64 KiB, which the kernel counts with the headers of its 1,500-byte pieces
HEADER = 14 + 20 + 32  # bytes: Ethernet, IPv4, and TCP with time stamps, without which no packet of ours travels


@dataclass(frozen=True)
class Link:
    """The cable between a rank and the switch. rate_mbit: 10^6 bits per second each way; None: as fast as it goes."""

    rate_mbit: float | None = None


class Sent(NamedTuple):
    """What the operating system counted at a rank's interface. bytes: of whole frames. packets: as handed to it, before
    a network card would cut them to size."""

    bytes: int
    packets: int

    def since(self, earlier: Sent) -> Sent:
        return Sent(self.bytes - earlier.bytes, self.packets - earlier.packets)

    @property
    def payload(self) -> int:
        """Bytes without Ethernet, IP and TCP headers; retransmissions and the backend's own messages still count."""
        return self.bytes - HEADER * self.packets


def setup_bridge() -> None:
    """Move this process, and with it all that it will start, to a network namespace with a switch and nothing else.

    Must come before torch is imported and before the first `launch.run`. Raises UsageError where that is not permitted.
    """
    if sys.platform != "linux":
        raise UsageError("separate networks for the ranks need Linux; leave that measurement out here.")
    for tool in ("ip", "tc"):
        if _found(tool) is None:
            raise UsageError(f"separate networks for the ranks need `{tool}`, which is not here; install iproute2.")
    try:
        _unshare()
        _run("ip", f"link add {SWITCH} type bridge", f"link set {SWITCH} up", "link set lo up")
    except OSError as error:
        raise UsageError(
            f"this machine does not permit network namespaces ({error.strerror or error}); run as root, in a container "
            "with CAP_SYS_ADMIN and CAP_NET_ADMIN, or leave that measurement out: its results are in book/results."
        ) from error


def run(worker: Any, arguments: Sequence[Any] = (), *, link: Link | None, **options: Any) -> list[Any]:
    """Do what `launch.run` does, and give every local rank a network of its own; link None: do not.

    Raises UsageError before anything is started where that cannot be, or `setup_bridge` was not called.
    """
    if link is None:
        return launch.run(worker, arguments, **options)
    if launch.under_torchrun() or options.get("backend", "gloo") != "gloo":
        raise UsageError("a network for each rank goes with local ranks on gloo only; drop torchrun and --backend.")
    if not is_bridge():
        raise UsageError(
            "a network for each rank needs a switch; call network_emulation.setup_bridge() before the world starts."
        )
    return launch.run(worker, arguments, before_joining=partial(attach, link), **options)


def is_bridge() -> bool:
    """Say whether this thread stands in a namespace that `setup_bridge` has made."""
    return _interface(SWITCH) is not None


def why_unavailable() -> str | None:
    """Return in one sentence why `setup_bridge` would fail here, or None. Tries it in a process of its own."""
    code = "from distmuon import launch; from muonbook.network_emulation import setup_bridge as setup"
    code += "; launch.command(setup)"
    folder = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True
    )
    return found.stderr.strip().removeprefix("error: ") if found.returncode else None


def attach(link: Link, address: str | None = None) -> None:
    """Give this process a network of its own, plugged into the switch, in which its parent stands.

    To be called before any socket exists. address: IPv4 within 10.0.0.0/8; None: one that no other process had.
    """
    pid = os.getpid()
    port = _port(pid)
    if address is None:  # the last world's hosts may take a second to go, and would answer under a number used again
        address = f"10.{pid >> 16 & 255}.{pid >> 8 & 255}.{pid & 255}"
    # a machine that comes back has the hardware address that its neighbours remember, which the kernel would draw
    hardware = "02:00:" + ":".join(f"{int(byte):02x}" for byte in address.split("."))
    with open("/proc/thread-self/ns/net") as switch:
        _call("unshare", CLONE_NEWNET)
        with open("/proc/thread-self/ns/net") as mine:
            _run(
                "ip",  # our parent, which started us, stands in the switch
                f"link add {INTERFACE} address {hardware} type veth peer name {port} netns {os.getppid()}",
                f"addr add {address}/8 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                "link set lo up",
            )
            _limit(INTERFACE, link)
            _call("setns", switch.fileno(), CLONE_NEWNET)
            _run("ip", f"link set {port} master {SWITCH}", f"link set {port} up")
            _limit(port, link)
            _call("setns", mine.fileno(), CLONE_NEWNET)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def link_down(pid: int) -> None:
    """Pull the cable of the process that has plugged in: packets are lost without a word. The caller is the switch."""
    _run("ip", f"link set {_port(pid)} down")


def link_up(pid: int) -> None:
    """Put the cable back."""
    _run("ip", f"link set {_port(pid)} up")


def sent() -> Sent:
    """Return what this rank has sent through its interface so far. Raises RuntimeError where it has none of its own."""
    fields = _interface(INTERFACE)
    if fields is None or os.environ.get("GLOO_SOCKET_IFNAME") != INTERFACE:
        raise RuntimeError("this rank has no network of its own; start the world with link=network_emulation.Link().")
    return Sent(int(fields[8]), int(fields[9]))


def _port(pid: int) -> str:
    """Return the name of the switch's end of that process's cable."""
    return f"port{pid}"


def _interface(name: str) -> list[str] | None:
    """Return the kernel's counters of an interface in this thread's namespace; None where there is none."""
    try:
        with open("/proc/thread-self/net/dev") as table:
            rows = dict(line.split(":", 1) for line in table if ":" in line)
    except FileNotFoundError:  # not Linux
        return None
    return next((numbers.split() for found, numbers in rows.items() if found.strip() == name), None)


def _limit(interface: str, link: Link) -> None:
    if link.rate_mbit is not None:
        # bytes that may pass at once: 2 ms of the rate, or one packet as TCP makes it, which the kernel would cut up
        burst = max(16_000, min(LARGEST_PACKET, int(link.rate_mbit * 1e6 / 8 * 0.002)))
        _run("tc", f"qdisc add dev {interface} root tbf rate {link.rate_mbit:g}mbit burst {burst} latency 4s")


def _unshare() -> None:
    """Enter a new network namespace, and where that takes rights which we lack, a user namespace that grants them."""
    try:
        _call("unshare", CLONE_NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _found(tool: str) -> str | None:
    """Return where `ip` or `tc` is; on Debian not on the path of those who are not root."""
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _run(tool: str, *lines: str) -> None:
    """Hand the lines to `ip` or `tc` at once; raise OSError with what it said."""
    done = subprocess.run([_found(tool) or tool, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{tool}: {' '.join(done.stderr.split())}")
