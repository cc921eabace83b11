"""Several machines train what one trains, to the bit, whatever happens to them; and nothing of them is left."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import cluster_worker
import pytest
import stored_pages
import worlds

from muonbook import jobs
from muonbook.ch18 import demo
from muonbook.ch18.machines import Machine

CLUSTER = str(Path(__file__).with_name("cluster_worker.py"))


def test_two_machines_lose_power_and_cable_and_end_at_the_bits_of_one() -> None:
    out = stored_pages.printed("18_beyond_one_machine", "python ../scripts/18_beyond_one_machine.py")
    lines = out.splitlines()
    assert len(lines) <= 25
    assert [line for line in lines if line.startswith("step")] == [
        "step 14   b is switched off",
        "step 10   gone on from the checkpoint: 3 steps are made again",
        "step 24   the cable of b is pulled",
        "step 20   gone on from the checkpoint: 3 steps are made again",
        "step 40   finished: both loops end, with exit code 0 and 0",
    ]
    assert out.count("says: Timed out waiting") == 2
    assert lines[-1].endswith("of 2 ranks on one machine to which nothing happened, bit for bit.")


def test_two_machines_on_one_network_of_which_one_falls_silent_train_what_one_trains() -> None:
    """With networks of their own they do so on the page, and in the drills."""
    ending = worlds.finish(CLUSTER, cluster_worker.TOGETHER, "a cable is pulled")
    assert (ending.code, ending.err) == (0, "")
    assert ending.out.splitlines() == [
        "a cable is pulled: Timed out waiting 5000ms; 3 lost", "exit codes 0 0", "to the bit True"
    ]  # fmt: skip


@pytest.mark.alone
@pytest.mark.usefixtures("permitted")
def test_whoever_kills_the_program_that_has_made_them_leaves_no_machine() -> None:
    before = set(os.listdir("/sys/class/net"))
    with worlds.command(CLUSTER, cluster_worker.APART, cluster_worker.HOLD) as running:
        running.wait_for(cluster_worker.HOLD)
        running.interrupt(signal.SIGKILL)
        assert running.end().code == -signal.SIGKILL
    assert set(os.listdir("/sys/class/net")) == before


def test_a_machine_that_runs_is_not_started_again(tmp_path: Path) -> None:
    machine = Machine(1, apart=False)
    try:
        machine.start(["sleep", "1000"], tmp_path / "log")
        with pytest.raises(AssertionError, match="a is running"):
            machine.start(["sleep", "1000"], tmp_path / "log")
    finally:
        machine.remove()
    assert machine.wait(0) == -signal.SIGKILL


def test_without_networks_of_their_own_the_story_begins_with_the_reason() -> None:
    stored = stored_pages.printed("18_beyond_one_machine", "python ../scripts/18_beyond_one_machine.py").splitlines()
    beginning = stored[: stored.index("")]
    with contextlib.closing(demo.report("this machine does not permit it.")) as telling:
        told = list(itertools.islice(telling, len(beginning)))
    (here,), (there,) = ([line for line in lines if line.startswith(jobs.HERE)] for lines in (told, beginning))
    assert here.endswith("b is stopped (SIGSTOP) where it has to fall silent: this machine does not permit it.")
    assert [line for line in told if line != here] == [line for line in beginning if line != there]


@pytest.mark.usefixtures("permitted")
def test_a_machine_has_its_own_name_processes_and_neighbours(tmp_path: Path) -> None:
    """And is pid 1's: whoever it starts is gone with it."""
    code = "from muonbook import network_emulation; network_emulation.setup_bridge(); import pathlib, sys; "
    code += "from muonbook.ch18.machines import Machine; m = Machine(2); "
    code += "m.start(['sh', '-c', sys.argv[1]], pathlib.Path(sys.argv[2])); print(m.wait(600))"
    inside = "cat /proc/sys/kernel/hostname; echo $$ $(ls -d /proc/[0-9]* | wc -l); getent hosts a; sleep 1000 & exit 7"
    words = [sys.executable, "-c", code, inside, str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": str(worlds.ROOT / "scripts")}
    said = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert said.stdout == "7\n", said.stderr
    name, numbers, neighbour = (tmp_path / "log").read_text().splitlines()
    assert name == "b"
    assert re.fullmatch(r"1 [1-4]", numbers)  # itself, and what it runs to count
    assert neighbour.split() == ["10.0.0.1", "a"]
