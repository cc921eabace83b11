"""Failures: whoever dies, and whenever, the right rank is named, and no process and no temporary file of ours is left.

Under torchrun, its own log folders stay: it never removes them.
"""

import gc
import os
import re
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import worlds

from distmuon import launch
from distmuon.launch import WorldError, session, supervise

pytestmark = pytest.mark.alone

FAULTY = str(Path(__file__).with_name("faulty_worker.py"))
INTERRUPTED = "error: interrupted; every rank was stopped.\n"
TIMEOUT = 10.0  # seconds that ranks wait for one that does not come, and for one that a busy machine is late to start
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for the fork server in /proc")


# ---- A rank fails: worlds of this process, one after the other --------------------------------------------


def failure(how: str, *culprits: int, dp: int = 2, tp: int = 2) -> WorldError:
    """Run a world in which the culprits misbehave; return its error, having looked for whatever is left behind."""
    with pytest.raises(WorldError) as error:
        launch.run(worlds.misbehave, (how, culprits), dp=dp, tp=tp, timeout=TIMEOUT)
    worlds.assert_worlds_left_nothing()
    return error.value


def test_a_rank_that_raises_is_named_with_its_traceback_although_its_peers_fail_too() -> None:
    error = failure("raise", 2)
    first, *trace, last = str(error).splitlines()
    assert (error.rank, first) == (2, "rank 2 failed first; the other ranks were stopped.")
    assert trace[0] == "Traceback (most recent call last):"
    assert "worlds.py" in trace[1]  # the reader's code comes first, without the launcher's own frames
    assert last == "ValueError: rank 2 has had enough"


@pytest.mark.parametrize("words", ["no Connection to the bank", "the timeout was wrong, and timed out"])
def test_a_rank_that_raises_is_named_whatever_its_words_remind_of(words: str) -> None:
    with pytest.raises(WorldError, match=words) as error:
        launch.run(worlds.complain, (1, words), dp=2, tp=2, timeout=TIMEOUT)
    assert error.value.rank == 1


def test_a_temporary_folder_that_is_full_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    error = failure("fill", 1)
    assert error.rank == 1
    assert re.fullmatch(
        r"rank 1 could not leave its result in the temporary folder, which is full; make room in \S+, or set TMPDIR to "
        r"another folder\.",
        str(error),
    )
    monkeypatch.setattr(session, "_directory", None)
    monkeypatch.setattr(session.tempfile, "tempdir", "/dev/full")
    with pytest.raises(launch.UsageError) as refused:
        session.directory()
    assert str(refused.value) == (
        "no temporary folder can be made (Not a directory); make room where temporary files go, or set TMPDIR to a "
        "folder that you may write to."
    )


def test_ranks_that_compute_are_stopped_when_another_raises() -> None:
    assert failure("raise while others compute", 3).rank == 3


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("kill", "rank 1 was killed by SIGKILL before it had finished; the other ranks were stopped."),
        ("leave", "rank 1 left with exit code 0 before it had finished; the other ranks were stopped."),
    ],
)
def test_a_rank_that_goes_without_a_word_is_named_although_its_peers_speak(how: str, says: str) -> None:
    error = failure(how, 1)
    assert (error.rank, str(error)) == (1, says)


def test_a_rank_that_stays_away_from_its_subgroup_is_named_at_the_given_timeout() -> None:
    error = failure("tp", 3)
    assert f"waited {TIMEOUT:g} s for its peers in vain; every rank was stopped." in str(error)
    place = str(error).split("rank 3 was still running, here (most recent call first):\n")[1].splitlines()
    assert "in oversleep" in place[0]
    assert "in misbehave" in place[1]
    assert error.rank in (3, None)


def test_ranks_that_wait_for_each_other_in_different_groups_are_all_placed() -> None:
    error = failure("different groups", 0, 3)
    placed = re.findall(
        r"^rank ([\d, ]+) (?:waited|failed in a collective too|was still running)", str(error), re.MULTILINE
    )
    assert sorted(", ".join(placed).split(", ")) == ["0", "1", "2", "3"]
    assert str(error).count("in misbehave") >= len(placed)


def test_a_stopped_rank_is_named_at_the_timeout_and_said_not_to_answer() -> None:
    error = failure("stop", 1, tp=1)
    assert error.rank == 1
    assert str(error).endswith("  it does not answer: it is stopped, or has not started yet")


def test_collectives_of_different_shapes_end_cleanly() -> None:
    error = failure("shapes", 1, tp=1)
    assert error.rank is not None  # gloo aborts one of the two, depending on who sends first
    assert "in misbehave" in str(error)


def test_a_rank_that_fails_before_it_joins_the_process_group_is_named() -> None:
    with pytest.raises(WorldError, match="ValueError: cannot be unpacked here") as error:
        launch.run(worlds.who, (worlds.Unpacks(1, worlds.refuse),), dp=3, timeout=TIMEOUT)
    assert error.value.rank == 1
    worlds.assert_worlds_left_nothing()


def test_a_rank_that_never_joins_the_process_group_is_named_at_the_timeout() -> None:
    with pytest.raises(WorldError, match="in oversleep") as error:
        launch.run(worlds.who, (worlds.Unpacks(1, worlds.oversleep),), dp=3, timeout=TIMEOUT)
    assert error.value.rank == 1
    worlds.assert_worlds_left_nothing()


def test_a_process_group_that_cannot_be_made_is_an_error_with_its_reason(monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch")
    with pytest.raises(WorldError, match=r"(?s)init_process_group.*nonesuch"):
        launch.run(worlds.who, dp=2, timeout=TIMEOUT)
    worlds.assert_worlds_left_nothing()


def test_a_result_that_cannot_be_sent_back_is_an_error_of_its_rank() -> None:
    with pytest.raises(WorldError, match=r"(?i)can't pickle"):
        launch.run(worlds.unpicklable, dp=2)
    worlds.assert_worlds_left_nothing()


@linux
def test_ranks_end_when_the_fork_server_is_killed_and_the_next_world_gets_a_new_one(tmp_path: Path) -> None:
    home, said = session.directory(), ""
    try:  # pytest.raises would keep the error, and with it our ends of the ranks' pipes
        launch.run(worlds.orphan, (str(tmp_path),), dp=4, timeout=TIMEOUT)
    except WorldError as error:
        said, culprit = str(error), error.rank
    assert (said, culprit) == (supervise.SERVER_GONE, None)
    gc.collect()  # closes them, which the ranks must not take for the launcher's end
    pids = [entry.name for entry in tmp_path.iterdir()]
    assert len(pids) == 4
    assert worlds.eventually(lambda: not any(Path("/proc", pid).exists() for pid in pids))
    assert os.path.isdir(home)  # what the next world and this process's end will use
    assert launch.run(worlds.misbehave, ("nothing", ()), dp=2) == [False, False]
    worlds.assert_worlds_left_nothing()


@linux
def test_a_fork_server_that_is_killed_while_ranks_start_is_said_to_have_ended(monkeypatch) -> None:
    ensure_running, started = forkserver._forkserver.ensure_running, []  # type: ignore[attr-defined]

    def killed_before_the_second_rank() -> None:
        ensure_running()
        started.append(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
        if len(started) == 3:  # asked once when the server starts, then by each rank
            os.kill(started[-1], signal.SIGKILL)
            os.waitid(os.P_PID, started[-1], os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(forkserver._forkserver, "ensure_running", killed_before_the_second_rank)  # type: ignore[attr-defined]
    monkeypatch.setattr(forkserver, "ensure_running", killed_before_the_second_rank)
    with pytest.raises(WorldError, match="the process that ranks are forked from has ended") as error:
        launch.run(worlds.misbehave, ("nothing", ()), dp=2)
    assert error.value.rank is None
    monkeypatch.undo()
    assert launch.run(worlds.misbehave, ("nothing", ()), dp=2) == [False, False]
    worlds.assert_worlds_left_nothing()


# ---- A rank fails: the command line -----------------------------------------------------------------------


def test_a_command_whose_rank_raises_prints_one_traceback_and_exits_with_1() -> None:
    ending = worlds.finish(FAULTY, "raise", "--dp", "4", "--culprit", "2")
    assert (ending.code, ending.out) == (1, "")
    assert ending.err.startswith("error: rank 2 failed first; the other ranks were stopped.\nTraceback")
    assert ending.err.endswith("ValueError: rank 2 has had enough\n")
    assert ending.err.count("Traceback") == 1


def test_torchrun_with_a_wrong_product_prints_one_sentence_and_its_ranks_exit_with_2() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with worlds.command(*torchrun, FAULTY, "imports", "--dp", "3", OMP_NUM_THREADS="1") as running:
        ending = running.end()
        left = {path.name.split("_")[0] for path in running.temporary.iterdir()}
    assert left == {"torchelastic"}  # torchrun's own logs, and nothing of ours
    assert ending.err.count("error: torchrun started 2 ranks, but --dp 3 --tp 1 makes 3; choose") == 1
    assert "exitcode  : 2" in ending.err
    assert ending.code == 1


def test_ranks_whose_torchrun_is_killed_say_so_and_end() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with worlds.command(*torchrun, FAULTY, "wait", OMP_NUM_THREADS="1") as running:
        running.wait_for("waiting\nwaiting")
        running.interrupt(signal.SIGKILL)
        ending = running.end()
    assert ending.code == -signal.SIGKILL
    for rank in range(2):
        assert f"rank {rank}: torchrun, which had started it, is gone; so it ends." in ending.err


@pytest.mark.parametrize("what", ["greet", "tell", "between"])
def test_a_command_whose_output_nobody_reads_ends_without_a_word(what: str) -> None:
    """As under `| head`: greet prints in a rank, tell when they have left, between in the launching process."""
    script = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); "
    script += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    assert worlds.finish("-c", script, FAULTY, what) == (141, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("what", ["greet", "tell", "between"])
def test_a_command_whose_output_finds_no_room_says_so_in_a_sentence(what: str, unbuffered: str) -> None:
    """Without a buffer it is `print` that fails, with one what empties it, and once more at the interpreter's end."""
    script = "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); "
    script += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    says = "what is printed cannot be written (No space left on device); send it where there is room, and run this"
    ending = worlds.finish("-c", script, FAULTY, what, PYTHONUNBUFFERED=unbuffered)
    assert ending == (1, "", f"error: {says} again.\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_that_is_not_the_output_is_an_error_like_any_other() -> None:
    script = "from distmuon import launch\ndef main(): open('/dev/full', 'w', 1).write('x\\n')\nlaunch.command(main)"
    ending = worlds.finish("-c", script)
    assert (ending.code, ending.err.splitlines()[-1]) == (1, "OSError: [Errno 28] No space left on device")


def test_a_broken_pipe_that_is_not_the_output_is_an_error_like_any_other() -> None:
    script = "from distmuon import launch\ndef main(): raise BrokenPipeError(32, 'Broken pipe')\nlaunch.command(main)"
    ending = worlds.finish("-c", script)
    assert (ending.code, ending.out) == (1, "")
    assert ending.err.endswith("BrokenPipeError: [Errno 32] Broken pipe\n")


# ---- The command is stopped -------------------------------------------------------------------------------


def test_ctrl_c_also_stops_what_is_made_of_the_results() -> None:
    with worlds.command(FAULTY, "dwell") as running:
        running.wait_for("rank 0 counts 1\n")
        running.interrupt(signal.SIGINT)
        assert running.end() == (130, "rank 0 counts 1\n", INTERRUPTED)


@pytest.mark.parametrize(
    ("moment", "number", "group", "code", "says"),
    [
        ("idle", signal.SIGINT, True, 130, INTERRUPTED),
        ("between", signal.SIGINT, False, 130, INTERRUPTED),
        ("idle", signal.SIGTERM, False, 143, "error: stopped by SIGTERM; every rank was stopped.\n"),
        ("between", signal.SIGHUP, False, 129, "error: stopped by SIGHUP; every rank was stopped.\n"),
    ],
)
def test_a_signal_ends_a_command_with_one_sentence(moment: str, number: int, group: bool, code: int, says: str) -> None:
    with worlds.command(FAULTY, moment) as running:
        running.wait_for("waiting")
        running.interrupt(number, group)
        assert running.end() == (code, "waiting\n", says)


def test_a_signal_while_a_world_is_being_cleaned_up_waits_until_that_is_done(monkeypatch) -> None:
    clean = supervise._stop

    def interrupted(ranks: list) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        clean(ranks)

    monkeypatch.setattr(supervise, "_stop", interrupted)
    with pytest.raises(session.Stopped) as stopped:
        supervise.run_local(worlds.double, (21,), 2, "spawn", 60)
    assert (stopped.value.name, stopped.value.code) == ("SIGTERM", 143)
    worlds.assert_worlds_left_nothing()


def test_of_a_burst_of_signals_only_the_first_one_raises_and_a_later_one_raises_again(monkeypatch) -> None:
    with session.stoppable():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(session, "BURST", 0.0)
        with pytest.raises(session.Stopped):
            signal.raise_signal(signal.SIGTERM)


@linux
def test_ctrl_c_while_the_fork_server_imports_torch_ends_a_command_with_one_sentence() -> None:
    with worlds.command(FAULTY, "wait") as running:
        running.wait_for_fork_server()
        time.sleep(0.3)
        (server,) = (line.split()[0] for line in running.running() if "multiprocessing.forkserver" in line)
        blocked = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{server}/status").read_text())
        assert blocked
        assert int(blocked[1], 16) & 1 << signal.SIGINT - 1  # or a traceback of its imports may show
        running.interrupt(signal.SIGINT, group=True)
        assert running.end() == (130, "", INTERRUPTED)


def test_a_command_under_nohup_outlives_its_terminal() -> None:
    script = f"import runpy, signal, sys; signal.signal(1, signal.SIG_IGN); sys.argv = [{FAULTY!r}, 'between']; "
    with worlds.command("-c", script + "runpy.run_path(sys.argv[0], run_name='__main__')") as running:
        running.wait_for("waiting")
        running.interrupt(signal.SIGHUP)
        time.sleep(0.2)
        assert running.process.poll() is None
        running.interrupt(signal.SIGTERM)
        assert running.end().code == 143


@linux
@pytest.mark.parametrize("moment", ["start", "between", "wait"])
def test_a_command_killed_at_any_moment_leaves_nothing(moment: str) -> None:
    with worlds.command(FAULTY, "wait" if moment == "start" else moment, "--dp", "2") as running:
        if moment == "start":
            running.wait_for_fork_server()
            time.sleep(0.3)
        else:
            running.wait_for("waiting")
            assert len(running.running()) >= (4 if moment == "between" else 6)  # tracker, fork server, shell, ranks
            assert running.files()
        running.interrupt(signal.SIGKILL)
        assert running.end().code == -signal.SIGKILL
        assert "Traceback" not in (running.home / "err").read_text()


@linux
@pytest.mark.parametrize("moment", ["wait", "start"])
def test_an_interrupted_notebook_cell_leaves_nothing(moment: str) -> None:
    """IPython's `!python` types Ctrl-C, waits 0.2 s, and then lets pexpect send four signals, 0.1 s apart."""
    with worlds.command(FAULTY, "wait" if moment == "start" else moment, terminal=True) as running:
        if moment == "start":
            running.wait_for_fork_server()
            time.sleep(0.3)
        else:
            running.wait_for("waiting")
        os.write(running.master, b"\x03\n")
        time.sleep(0.2)
        for number in (signal.SIGHUP, signal.SIGCONT, signal.SIGINT, signal.SIGKILL):
            if running.process.poll() is None:
                running.interrupt(number)
                time.sleep(0.1)
        ending = running.end()
    assert "Traceback" not in ending.out
    assert ending.code in (130, -signal.SIGHUP, -signal.SIGKILL)  # on a busy machine it may take longer than 0.2 s
    if ending.code == 130:
        assert ending.out.endswith(INTERRUPTED)
