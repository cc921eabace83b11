"""Drills of what lies on the disk, and of what the numbers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from distmuon.extras.checkpoint import runs
from muonbook.ch18.drills.faults import Fault
from muonbook.ch18.drills.harness import STEPS, DrillGround, Row
from muonbook.ch18.drills.ranks import AGAIN, AT_ONCE, BY_ITSELF

LOADING, NUMBERS = "loading", "the numbers"
NEWEST, OLDER = 8, 4  # steps of the checkpoints that are there


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


DRILLS: dict[str, Callable[[DrillGround, str], Row]] = {
    **dict.fromkeys(DAMAGES, play_damage),
    "every checkpoint damaged": play_all_damaged,
    "a loss that is no number": play_nan,
    "a storm of NaN": play_nan_storm,
}
