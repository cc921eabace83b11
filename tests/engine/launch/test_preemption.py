"""Being asked to stop: ranks get their time, no more, and whoever started them hears how it was used."""

import signal
from pathlib import Path

import pytest
import worlds

from distmuon import launch
from distmuon.launch import session
from distmuon.launch.session import BURST

pytestmark = pytest.mark.alone

WORKER = str(Path(__file__).with_name("faulty_worker.py"))


def stopped(number: int, *arguments: str, twice: bool = False, group: bool = False) -> worlds.Ending:
    with worlds.command(WORKER, *arguments) as running:
        running.wait_for("working\n" * (1 if "1" in arguments else 2))
        running.interrupt(number, group)
        if twice:
            worlds.time.sleep(BURST + 0.5)
            running.interrupt(number)
        return running.end()


@pytest.mark.parametrize(
    ("number", "dp", "group"),  # to the whole process group: from a terminal, from `timeout`, from SLURM
    [(signal.SIGTERM, 1, False), (signal.SIGTERM, 2, False), (signal.SIGHUP, 2, True), (signal.SIGINT, 2, True)],
)
def test_ranks_return_what_they_have_saved_and_the_exit_code_tells_of_the_signal(
    number: int, dp: int, group: bool
) -> None:
    ending = stopped(number, "heed", "--dp", str(dp), group=group)
    saved = "".join(f"rank {rank} has saved\n" for rank in range(dp))
    assert ending == (128 + number, "working\n" * dp + saved, "")


@pytest.mark.parametrize("dp", ["1", "2"])
def test_whoever_asks_twice_does_not_wait(dp: str) -> None:
    ending = stopped(signal.SIGINT, "slow", "--dp", dp, twice=True)
    assert (ending.code, ending.err) == (130, "error: interrupted; every rank was stopped.\n")


def test_who_needs_longer_is_stopped() -> None:
    ending = stopped(signal.SIGTERM, "slow", "--stop-within", "0.5")
    assert (ending.code, ending.err) == (143, "error: stopped by SIGTERM; every rank was stopped.\n")


def test_a_failure_while_saving_is_told_as_such() -> None:
    ending = stopped(signal.SIGTERM, "fail")
    assert ending.code == 1
    assert ending.err.startswith("error: rank 0 failed first; the other ranks were stopped.\n")
    assert ending.err.endswith("OSError: no space left on this device\n")


def test_a_run_that_was_not_asked_knows_of_no_earlier_one() -> None:
    session.note_stop(signal.SIGTERM)
    assert session.stop_code() == 143
    launch.run(worlds.who)
    assert session.stop_code() == 0


def test_a_time_that_cannot_be_is_refused() -> None:
    with pytest.raises(launch.UsageError, match=r"stop_within is -1; give a positive number of seconds, or None\."):
        launch.run(worlds.who, stop_within=-1)
