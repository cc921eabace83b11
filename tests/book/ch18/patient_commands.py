"""Commands of chapter 18 that take their time."""

from __future__ import annotations

import worlds

WORKER = str(worlds.ROOT / "scripts" / "18_beyond_one_machine.py")
LONG = 3000.0  # seconds, on a machine with much else to do


def finish(*words: str) -> worlds.Ending:
    """Run `python *words` to its end, and assert that it leaves nothing."""
    with worlds.command(*words) as running:
        running.process.wait(LONG)
        return running.end()
