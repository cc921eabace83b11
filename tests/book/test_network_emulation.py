"""Networks for ranks: they count what is sent and limit it, they leave nothing, and where they cannot be it is said."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import worlds

from distmuon.launch import UsageError
from muonbook import network_emulation

pytestmark = pytest.mark.alone

WORKER = str(Path(__file__).with_name("network_workers.py"))
SEGMENT = 1448  # bytes of payload in a TCP segment of 1500
linux = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")


def interfaces() -> set[str]:
    """Return the machine's own interfaces."""
    return set(os.listdir("/sys/class/net"))


def namespaces() -> set[str]:
    """Return the network namespaces that some process lives in."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found


# ---- Counting and limiting --------------------------------------------------------------------------------


@pytest.mark.usefixtures("permitted")
def test_what_leaves_a_ranks_interface_is_what_the_ledger_says() -> None:
    ranks, excess = 3, list[float]()
    for _ in range(3):  # what a busy machine sends again only adds
        ending = worlds.finish(WORKER, "count", "--dp", str(ranks))
        assert (ending.code, ending.err) == (0, "")
        rows = [line.split() for line in ending.out.splitlines()]
        assert len(rows) == ranks
        for payload, _, ledger, seen, limited, _ in rows:
            assert int(payload) >= int(ledger)
            assert sorted(seen.split(",")) == ["eth0", "lo"]  # its own network, and nothing of the machine's
            assert limited == "False"
        once = [(int(payload) - SEGMENT * int(resent), int(ledger)) for payload, resent, ledger, *_ in rows]
        excess.append(max(payload / ledger for payload, ledger in once))
        if excess[-1] < 1.03:
            break
    assert min(excess) < 1.03


@pytest.mark.usefixtures("permitted")
def test_a_limited_link_holds_packets_back() -> None:
    """No clock is asked: the token bucket itself counts how often it had to say `not yet`."""
    ending = worlds.finish(WORKER, "count", "--rate", "200")
    assert (ending.code, ending.err) == (0, "")
    for *_, limited, overlimits in (line.split() for line in ending.out.splitlines()):
        assert limited == "True"
        assert int(overlimits) > 0


# ---- Nothing is left --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("permitted")
@pytest.mark.parametrize("who", ["rank", "launcher", "terminated launcher"])
def test_whoever_dies_no_namespace_cable_process_or_file_is_left(who: str) -> None:
    before = interfaces()
    with worlds.command(WORKER, "kill" if who == "rank" else "sleep") as running:
        running.wait_for("waiting")
        homes = set(re.findall(r"net:\[\d+\]", running.printed()))
        assert len(homes) == 2
        if who != "rank":
            running.interrupt(signal.SIGKILL if who == "launcher" else signal.SIGTERM)
        ending = running.end()
    assert ending.code == {"rank": 1, "launcher": -signal.SIGKILL, "terminated launcher": 143}[who]
    assert worlds.eventually(lambda: not homes & namespaces())
    assert interfaces() == before  # a cable's other end would be a port here, had it been plugged in here


# ---- Where it cannot be -----------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize(
    ("what", "options", "environment"),
    [
        ("needs a switch; call network_emulation.setup_bridge()", [], {}),
        ("local ranks on gloo only", ["--backend", "nccl"], {}),
        (
            "local ranks on gloo only",
            [],
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        ),
    ],
    ids=["no switch", "nccl", "torchrun"],
)
def test_a_world_that_cannot_have_links_is_refused(what: str, options: list[str], environment: dict[str, str]) -> None:
    ending = worlds.finish(WORKER, "unplugged", *options, **environment)
    assert (ending.code, ending.out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\.\n", ending.err)
    assert what in ending.err


def test_a_process_without_a_network_of_its_own_has_no_count() -> None:
    assert not network_emulation.is_bridge()
    with pytest.raises(RuntimeError, match="no network of its own"):
        network_emulation.sent()
    with pytest.raises(UsageError, match=r"network_emulation\.setup_bridge"):
        network_emulation.run(worlds.who, dp=2, link=network_emulation.Link())


@linux
def test_what_the_machine_refuses_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *arguments: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(network_emulation, "_call", refuse)
    monkeypatch.setattr(network_emulation, "_found", lambda tool: tool)
    with pytest.raises(UsageError, match=r"^this machine does not permit .* \(Operation not permitted\); run as root"):
        network_emulation.setup_bridge()
    monkeypatch.setattr(network_emulation, "_found", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(UsageError, match=r"^separate networks for the ranks need `tc`, .* install iproute2\.$"):
        network_emulation.setup_bridge()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="need Linux"):
        network_emulation.setup_bridge()


@linux
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs a root that can give up its rights")
def test_a_root_without_rights_is_told_so() -> None:
    """As in most containers. Whether user namespaces help it depends on the kernel; what is said is one sentence."""
    code = "from muonbook import network_emulation; print(network_emulation.why_unavailable())"
    given_up = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(worlds.ROOT / "scripts")}
    said = subprocess.run(given_up, env=environment, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"None\n|(this machine does not permit|separate networks)[^\n]+\.\n", said)
