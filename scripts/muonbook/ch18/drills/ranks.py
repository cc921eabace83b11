"""Drills in which a rank fails, at every place of a step and of a save; started anew, the training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from muonbook.ch18.drills.faults import Fault
from muonbook.ch18.drills.harness import EVERY, PATIENT, STEPS, TIMEOUT, Attempt, DrillFailed, DrillGround, Row

AT_ONCE, AT_TIMEOUT, NEVER = "at once", "at the timeout", "not at all"
AGAIN, BY_ITSELF = "the same command", "by itself"
TRIES = 10
KILLED = r"rank {} was killed by SIGKILL before it had finished"


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


DRILLS: dict[str, RankDrill] = {
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
    drill = DRILLS[name]
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
