"""Where drills take place: a small training that is tried, broken off, gone on with, and compared with the undisturbed.

Every drill ends as a `Row`; what was seen is kept without folders and times.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distmuon import launch
from distmuon.extras.checkpoint import runs
from distmuon.launch import WorldError
from distmuon.launch.cli import option_of
from distmuon.models.run_settings import RunSettings
from muonbook.ch18 import checkpoint_contents
from muonbook.ch18.drills.faults import ACTED, JOB, Fault

RANKS = 2
TIMEOUT = 5.0  # seconds that a collective waits where a rank hangs
PATIENT = 1800.0  # where none does: more than a drill may take, so that no rank is given up for its neighbour
STEPS, EVERY = 12, 4
SMALL = {"width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 4, "log_every": 1}
LONGEST = 900.0  # seconds that a drill may take, restart included, on a machine that has ten times as much to do
SAME = "to the bit"


class DrillFailed(WorldError):
    """Something that must not happen: training was lost, a rank hung, an end differs, a message says too little."""

    def __init__(self, what: str) -> None:
        super().__init__(what, None)


class Row(NamedTuple):
    """One line of the table of failures. seen: what was said. lost: recorded steps that had to be made again. end: the
    last checkpoint, beside that of the undisturbed run. after: timeouts that passed until it was seen, where that was
    measured; all else is the same on every machine."""

    drill: str
    where: str
    done: str
    seen: str
    when: str
    lost: int
    goes_on: str
    end: str
    after: float | None = None


class Attempt(NamedTuple):
    """One start of the training. error: of the launcher, or None. said: everything printed. reached: the last step that
    was made; first: the one before this start's first. late: timeouts that passed between a fault and the end."""

    ended: Any
    error: str | None
    said: str
    reached: int
    first: int
    late: float | None


def words_of(settings: Mapping[str, object]) -> list[str]:
    """Return settings of train.py as words of its command line."""
    return [word for name, value in settings.items() for word in (option_of(name), str(value))]


class DrillGround:
    """A folder for drills, and the undisturbed run that all of them are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.undisturbed = self.run_of("undisturbed")
        self.expect(self.attempt("undisturbed").ended.step == STEPS, "the undisturbed run did not finish")

    def run_of(self, drill: str) -> Path:
        return self.folder / drill.replace(" ", "-") / "run"

    def options(self, drill: str) -> dict[str, Any]:
        """Return the options of train.py, as both its command line and RunSettings have them."""
        return {**SMALL, "steps": STEPS, "save_every": EVERY, "keep": 2, "folder": str(self.run_of(drill))}

    def begin(self, drill: str, after: int | None = None) -> Path:
        """Return the run's folder, empty, or as the undisturbed run left it with checkpoints up to this step."""
        run = self.run_of(drill)
        shutil.rmtree(run.parent, ignore_errors=True)
        if after is None:
            run.mkdir(parents=True)
            return run
        shutil.copytree(self.undisturbed, run)
        for step in range(after + 1, STEPS + 1):
            shutil.rmtree(runs.at_step(run, step), ignore_errors=True)
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[:after]))
        return run

    def attempt(self, drill: str, faults: Sequence[Fault] = (), timeout: float = PATIENT, **changes: Any) -> Attempt:
        """Start the training once, whatever was left by the last time; return what came of it."""
        run, start = self.run_of(drill), time.monotonic()
        run.mkdir(parents=True, exist_ok=True)
        log, acted = run.parent / "log", run.parent / ACTED
        log.unlink(missing_ok=True)
        acted.unlink(missing_ok=True)
        ended, error = None, None
        try:
            job = (RunSettings(**{**self.options(drill), **changes}), tuple(faults), str(log))
            ended, *_ = launch.run(JOB, job, dp=RANKS, timeout=timeout)
            error = ended.unsaved or None
        except WorldError as failed:
            error = str(failed)
        now = time.monotonic()
        self.expect(now - start < LONGEST, f"took {now - start:.0f} s")
        late = (now - float(acted.read_text())) / timeout if acted.exists() else None
        said = log.read_text() if log.exists() else ""
        gone_on = re.search(r"^step +(\d+) +gone on from", said, re.M)
        return Attempt(ended, error, said, checkpoint_contents.reached(run), int(gone_on[1]) if gone_on else 0, late)

    def seen(self, pattern: str, text: str) -> str:
        """Return what was said, without the folder's own place. Raises DrillFailed where it was not."""
        found = re.search(pattern, text)
        self.expect(found is not None, f"nothing says {pattern!r}:\n{text}")
        assert found
        return re.sub(rf"{re.escape(str(self.folder))}/[^/]+/", "", found[0])

    def finish(self, drill: str, **changes: Any) -> Attempt:
        """Start the training again, with nothing wrong; it must come to the end."""
        again = self.attempt(drill, **changes)
        self.expect(again.error is None, f"did not go on: {again.error}")
        self.expect(again.ended.step == STEPS, f"did not go on: {again.ended}")
        return again

    def end(self, drill: str) -> str:
        same = checkpoint_contents.same_end(self.run_of(drill), self.undisturbed)
        self.expect(same, f"{drill}: the end is not the undisturbed one")
        return SAME

    @staticmethod
    def expect(true: bool, otherwise: str) -> None:
        if not true:
            raise DrillFailed(otherwise)
