"""Drills of ranks that fail, at every place of a step and of a save; of checkpoints, of numbers, and of the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from distmuon.extras.checkpoint import runs
from muonbook import processes
from muonbook.ch18 import checkpoint_contents
from muonbook.ch18.drills.faults import HELD, PROGRAM, Fault
from muonbook.ch18.drills.harness import (
    EVERY,
    LONGEST,
    PATIENT,
    RANKS,
    STEPS,
    TIMEOUT,
    Attempt,
    DrillFailed,
    DrillGround,
    Row,
    words_of,
)  # fmt: skip

AT_ONCE, AT_TIMEOUT, NEVER = "at once", "at the timeout", "not at all"
AGAIN, BY_ITSELF = "the same command", "by itself"
TRIES = 10
KILLED = r"rank {} was killed by SIGKILL before it had finished"
LOADING, NUMBERS, COMMAND = "loading", "the numbers", "the command"  # where something happens, beside steps and saves
NEWEST, OLDER = 8, 4  # steps of the checkpoints that are there


# ---- Ranks ------------------------------------------------------------------------------------------------


class RankDrill(NamedTuple):
    """faults: what happens. says: patterns of what the launcher, or a rank, must say. lost: steps. after: the step
    after which the training is begun; None: anew. changes: of the settings, in the first start."""

    done: str
    faults: tuple[Fault, ...]
    says: tuple[str, ...]
    lost: int
    when: str = AT_ONCE
    where: str = "a step"
    after: int | None = None
    changes: Mapping[str, int] = MappingProxyType({})


def _kill(rank: int, done: str, place: str, step: int | None, lost: int, where: str = "a step", **more: Any) -> Any:
    return RankDrill(done, (Fault("kill", place, step, rank),), (KILLED.format(rank),), lost, where=where, **more)


OF_RANKS: dict[str, RankDrill] = {
    "killed before the first step": _kill(1, "rank 1 is killed while it builds the model", "build", None, 0),
    "killed while it goes on": _kill(1, "rank 1 is killed while it loads", "resume", None, 0, "loading", after=8),
    "killed before the forward pass": _kill(1, "rank 1 is killed as step 7 begins", "step", 7, 2),
    "killed with gradients": _kill(0, "rank 0 is killed after the backward pass of step 7", "gradients", 7, 2),
    "killed in a collective": _kill(1, "rank 1 is killed before the sum of losses", "agree", 7, 2),
    "killed before the update": _kill(1, "rank 1 is killed as the optimizer begins", "update", 7, 2),
    "killed after the update": _kill(1, "rank 1 is killed in step 7, before it is recorded", "updated", 7, 2),
    "killed in the evaluation": _kill(1, "rank 1 is killed on the held-out text", "evaluate", STEPS, 4),
    "killed before saving": _kill(0, "rank 0 is killed as it begins to save step 8", "save", 8, 4, "a save"),
    "killed while writing": _kill(1, "rank 1 is killed as it writes its file", "write", 8, 4, "a save"),
    "killed before the manifest": _kill(0, "rank 0 is killed when all files are written", "manifest", 8, 4, "a save"),
    "killed before the rename": _kill(0, "rank 0 is killed before the folder gets its name", "rename", 8, 4, "a save"),
    "killed while removing": _kill(
        0, "rank 0 is killed as it removes an old checkpoint", "remove", 6, 0, "a save",
        changes={"save_every": 2, "keep": 1},
    ),
    "all killed": RankDrill(
        "every rank is killed in step 7", (Fault("kill", "gradients", 7),), (KILLED.format(0),), 2
    ),
    "left without a word": RankDrill(
        "rank 1 leaves with exit code 0", (Fault("leave", "step", 7, 1),),
        ("rank 1 left with exit code 0 before it had finished",), 2,
    ),
    "an exception": RankDrill(
        "rank 1 raises in step 7", (Fault("raise", "gradients", 7, 1),),
        ("rank 1 failed first", "IndexError: rank 1 has a bug"), 2,
    ),
    "out of memory": RankDrill(
        "rank 1 asks for more memory than it may have", (Fault("starve", "step", 7, 1),),
        ("rank 1 failed first", "DefaultCPUAllocator: can't allocate memory"), 2,
    ),
    "a stopped rank": RankDrill(
        "rank 1 is stopped (SIGSTOP)", (Fault("stop", "step", 7, 1),),
        (f"rank 0 waited {TIMEOUT:g} s for its peers in vain", "rank 1 was still running",
         "it does not answer: it is stopped"), 2, AT_TIMEOUT,
    ),
    "a rank that hangs": RankDrill(
        "rank 1 sleeps for good", (Fault("oversleep", "agree", 7, 1),),
        (f"rank 0 waited {TIMEOUT:g} s for its peers in vain", "rank 1 was still running", "in _oversleep"), 2,
        AT_TIMEOUT,
    ),
    "a rank stopped while saving": RankDrill(
        "rank 1 is stopped as it writes its file", (Fault("stop", "write", 8, 1),),
        (r"\S+ was not saved: RuntimeError", "it does not answer: it is stopped"), 4,
        AT_TIMEOUT, "a save",
    ),
    "a slow rank": RankDrill(
        "rank 1 is half a second late in three steps", (Fault("dawdle", "step", 6, 1, last=8),), (), 0, NEVER
    ),
    "a full disk": RankDrill(
        "rank 1 finds no space as it saves step 8", (Fault("fill disk", "write", 8, 1),),
        (r"\S+ was not saved: OSError: \[Errno 28\] No space left on device",), 0, where="a save",
    ),
    "a full disk at the end": RankDrill(
        "rank 1 finds no space as it saves the last step", (Fault("fill disk", "write", STEPS, 1),),
        (r"\S+ was not saved: OSError: \[Errno 28\] No space left on device",), EVERY, where="a save",
    ),
}  # fmt: skip


def play(ground: DrillGround, name: str) -> Row:
    """Let it happen, start again, and see that nothing is lost but steps since the last checkpoint."""
    drill = OF_RANKS[name]
    first = _until_it_happens(ground, name, drill)
    seen = "; ".join(ground.seen(pattern, f"{first.error}\n{first.said}") for pattern in drill.says) or "nothing"
    if first.error is None:
        return Row(name, drill.where, drill.done, seen, drill.when, drill.lost, BY_ITSELF, ground.end(name))
    ground.expect(("in vain" in first.error) == (drill.when == AT_TIMEOUT), f"not seen {drill.when}: {first.error}")
    again = ground.finish(name)
    lost = first.reached - again.first
    ground.expect(lost == drill.lost, f"{lost} steps were lost, not {drill.lost}")
    return Row(name, drill.where, drill.done, seen, drill.when, lost, AGAIN, ground.end(name), first.late)


def _until_it_happens(ground: DrillGround, name: str, drill: RankDrill) -> Attempt:
    """Begin the training, anew where a short timeout ran out before the fault, as on a busy machine; return its end."""
    timeout = TIMEOUT if drill.when == AT_TIMEOUT else PATIENT
    for _ in range(TRIES):
        ground.begin(name, drill.after)
        first = ground.attempt(name, drill.faults, timeout, **drill.changes)
        if first.error is None or first.late is not None:
            return first
    raise DrillFailed(f"{name}: failed {TRIES} times before anything had happened, at last with {first.error}")


# ---- Checkpoints ------------------------------------------------------------------------------------------


class Damage(NamedTuple):
    done: str
    harm: Callable[[Path], Any]  # given the newest checkpoint
    says: str


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


DAMAGES = {
    "a truncated file": Damage(
        "the newest checkpoint lacks 7 bytes", lambda f: _truncate(f / "__1_0.distcp"), r"has \d+ bytes, not \d+"
    ),
    "a flipped bit": Damage(
        "one bit of the newest checkpoint has changed", lambda f: _flip(f / "__0_0.distcp"), "is damaged: it is not"
    ),
    "a flipped bit in the manifest": Damage(
        "one bit of its manifest has changed", lambda f: _flip(f / "manifest.json"), r"manifest\.json is damaged"
    ),
    "a missing file": Damage(
        "a file of the newest checkpoint is gone", lambda f: (f / "__1_0.distcp").unlink(), r"distcp is missing"
    ),
    "a missing manifest": Damage(
        "its manifest is gone", lambda f: (f / "manifest.json").unlink(), r"has no manifest\.json"
    ),
}


def play_damage(ground: DrillGround, name: str) -> Row:
    """Damage the newest checkpoint: it is refused aloud, and the run goes on from the one before."""
    damage = DAMAGES[name]
    run = ground.begin(name, NEWEST)
    damage.harm(newest := runs.at_step(run, NEWEST))
    again = ground.finish(name)
    seen = ground.seen(rf"refused +(.*{damage.says})", again.said)
    ground.expect(again.first == OLDER, f"went on from step {again.first}, not {OLDER}")
    ground.expect((run / f"refused-{newest.name}").is_dir(), "the refused checkpoint was not set aside")
    return Row(name, LOADING, damage.done, seen, AT_ONCE, NEWEST - again.first, BY_ITSELF, ground.end(name))


def play_all_damaged(ground: DrillGround, name: str) -> Row:
    """Damage every checkpoint: the run is not begun anew behind anybody's back."""
    run = ground.begin(name, NEWEST)
    for step in (OLDER, NEWEST):
        _flip(runs.at_step(run, step) / "__0_0.distcp")
    refused = ground.attempt(name).ended.refused
    seen = ground.seen("is damaged: .*, and 1 older ones likewise", refused)
    for step in (OLDER, NEWEST):
        _flip(runs.at_step(run, step) / "__0_0.distcp")
    again = ground.finish(name)
    return Row(
        name, LOADING, "every checkpoint is damaged", seen, AT_ONCE, NEWEST - again.first, "with one that is whole",
        ground.end(name),
    )  # fmt: skip


# ---- Numbers ----------------------------------------------------------------------------------------------


def play_nan(ground: DrillGround, name: str) -> Row:
    """Let one rank's loss be no number once: all ranks skip that step, and go on together."""
    ground.begin(name)
    first = ground.attempt(name, [Fault("nan", "loss", 7, 1)])
    ground.expect(first.error is None and first.ended.step == STEPS, f"did not go on: {first.error}")
    seen = ground.seen(r"step +7 +skipped: loss nan, gradient norm nan", first.said)
    return Row(
        name, NUMBERS, "the loss of rank 1 is NaN in step 7", seen, AT_ONCE, 0, BY_ITSELF, "one step short of it"
    )


def play_nan_storm(ground: DrillGround, name: str) -> Row:
    """Let one rank's loss be no number from step 7 on: the run ends, having saved nothing of that."""
    ground.begin(name)
    first = ground.attempt(name, [Fault("nan", "loss", 7, 1, last=100)], steps=100)
    ground.expect(first.ended.diverged and first.ended.step == 16, f"did not give up: {first.ended}")
    seen = ground.seen(r"step +16 +skipped: loss nan, gradient norm nan \(10 of 10\)", first.said)
    again = ground.finish(name)
    ground.expect(again.first == OLDER, f"went on from step {again.first}, within the storm")
    lost = 6 - again.first  # of those that were any good
    done = "the loss of rank 1 is NaN from step 7 on"
    return Row(name, NUMBERS, done, seen, "after ten steps", lost, AGAIN, ground.end(name))


# ---- The command ------------------------------------------------------------------------------------------

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
    return Row(name, COMMAND, done, seen, AT_ONCE, lost, AGAIN, ground.end(name))


ON_GROUND: dict[str, Callable[[DrillGround, str], Row]] = {
    **dict.fromkeys(OF_RANKS, play),
    **dict.fromkeys(DAMAGES, play_damage),
    "every checkpoint damaged": play_all_damaged,
    "a loss that is no number": play_nan,
    "a storm of NaN": play_nan_storm,
    **dict.fromkeys(SIGNALS, play_signal),
}
