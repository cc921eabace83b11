"""Drills in which the command itself is told to stop, or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from muonbook import processes
from muonbook.ch18 import checkpoint_contents
from muonbook.ch18.drills.faults import HELD, PROGRAM
from muonbook.ch18.drills.harness import EVERY, LONGEST, PATIENT, RANKS, STEPS, DrillGround, Row, words_of
from muonbook.ch18.drills.ranks import AGAIN, AT_ONCE

WHERE = "the command"
HELD_AT = 7  # the step in which rank 0 waits for what is to come
SIGNALS = {  # drill -> what is done, the signal, the exit code, the steps that are lost
    "asked to stop": ("SIGTERM, as from a scheduler", signal.SIGTERM, 128 + signal.SIGTERM, 0),
    "interrupted": ("Ctrl-C", signal.SIGINT, 128 + signal.SIGINT, 0),
    "killed as a whole": ("SIGKILL to the launcher alone", signal.SIGKILL, -signal.SIGKILL, HELD_AT - 1 - EVERY),
}


def begin(command: list[str], run: Path, faults: str) -> subprocess.Popen[bytes]:
    """Start the command with faults; what it prints goes to a file beside the run."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), "FAULTS": faults}
    with open(run.parent / "log", "ab") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=_by_itself,
        )  # fmt: skip


def _by_itself() -> None:
    """Make a process end with this one, and hear Ctrl-C, which whatever a shell starts in the background ignores."""
    processes.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(ground: DrillGround, true: Callable[[], object], what: str) -> None:
    """Wait until `true()`. Raises DrillFailed when that takes too long."""
    deadline = time.monotonic() + LONGEST
    while not true():
        ground.expect(time.monotonic() < deadline, f"waited for {what} in vain")
        time.sleep(0.02)


def play_signal(ground: DrillGround, name: str) -> Row:
    """Signal the command in the middle of a step; no process of it may be left, and the same command goes on."""
    done, number, code, lost = SIGNALS[name]
    run = ground.begin(name)
    options = words_of({"dp": RANKS, "timeout": PATIENT} | ground.options(name))
    running = begin([sys.executable, "-m", PROGRAM, *options], run, f"hold step {HELD_AT} 0")
    held = run.parent / HELD.format(HELD_AT)
    wait_for(ground, lambda: held.exists() or running.poll() is not None, f"step {HELD_AT}")
    ground.expect(held.exists(), f"ended too early:\n{(run.parent / 'log').read_text()}")
    ranks = processes.descendants(running.pid)
    os.kill(running.pid, number)
    ground.expect(running.wait(LONGEST) == code, f"exit code {running.returncode}, not {code}")
    wait_for(ground, lambda: not set(ranks) & set(processes.running()), "its processes to end")
    said = (run.parent / "log").read_text()
    stopped = rf"stopped after step {HELD_AT} of {STEPS}; saved in run; the same command goes on"
    seen = f"exit code {code}" if code < 0 else ground.seen(stopped, said.replace(str(run), "run"))
    reached = checkpoint_contents.reached(run)
    again = ground.finish(name)
    ground.expect(reached - again.first == lost, f"{reached - again.first} steps were lost, not {lost}")
    return Row(name, WHERE, done, seen, AT_ONCE, lost, AGAIN, ground.end(name))


DRILLS = dict.fromkeys(SIGNALS, play_signal)
