"""Commands of chapter 18 that take their time, and machines that they may be refused."""

from __future__ import annotations

import os

import pytest
import worlds
from once import once

from distmuon.launch import hosts

WORKER = str(worlds.ROOT / "scripts" / "18_beyond_one_machine.py")
LONG = 300.0  # seconds, on a machine with much else to do


@once
def obstacle() -> str | None:
    return hosts.obstacle()


@pytest.fixture
def permitted() -> None:
    """Skip where machines cannot have networks of their own, but on the machine that runs every change."""
    if why := obstacle():
        assert not os.environ.get("CI"), why
        pytest.skip(why)


def finish(*words: str) -> worlds.Ending:
    """Run `python *words` to its end, and assert that it leaves nothing."""
    with worlds.command(*words) as running:
        running.process.wait(LONG)
        return running.end()
