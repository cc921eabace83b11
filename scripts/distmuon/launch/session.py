"""A run's footprint outside its own memory: one temporary directory, some environment, three signals. All put back.

The directory is the hard part: its owner can be killed by SIGKILL at any moment, and then runs no `finally`. So a shell
is started with it, the cleanup process. It reads a pipe that only the owner holds; when the pipe closes, for whatever
reason, it kills the fork server, which may still be importing torch and making files, and removes the directory.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

from distmuon.launch.cli import UsageError

PRELOAD = ["distmuon.launch.preload"]  # what the fork server imports before it forks the first rank
CLEANUP = """
while read -r pid; do server=$pid; done
kill -9 $server
rm -rf "$0" || { sleep 1; rm -rf "$0"; }
"""  # twice: a rank may be writing its last file
SOCKET_NAME = len("/pymp-12345678/listener-12345678")  # what the fork server adds to the directory's path
_IMPORTED = time.time()


def process_start() -> float:
    """Return the wall-clock time (seconds) at which this process started, imports and interpreter included."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            running = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - running
    except OSError:
        return _IMPORTED  # no /proc (macOS): a few hundredths of a second late


# ---- The directory ----------------------------------------------------------------------------------------

_directory: str | None = None
_cleanup: subprocess.Popen[str] | None = None


def directory() -> str:
    """Return this process's one temporary directory; it goes when the process does, however it does.

    It outlives a world because the fork server, which the next world reuses, keeps its socket in it.
    """
    global _directory, _cleanup
    if _directory is None or not os.path.isdir(_directory):
        with undisturbed():
            try:
                path = tempfile.mkdtemp(prefix="distmuon-")
            except OSError as error:
                remedy = "make room where temporary files go, or set TMPDIR to a folder that you may write to"
                raise UsageError(f"no temporary folder can be made ({error.strerror}); {remedy}.") from error
            try:
                _cleanup = subprocess.Popen(
                    ["/bin/sh", "-c", CLEANUP, path],
                    text=True,
                    bufsize=1,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,  # whoever reads our output must not wait for it
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,  # signals to our process group or terminal must not reach it
                )
            except BaseException:  # too many processes, say: nobody would ever remove it
                os.rmdir(path)
                raise
            # after multiprocessing's own clean-up at -100, which expects its part of the directory to be there
            multiprocessing.util.Finalize(None, _cleanup.communicate, exitpriority=-200)
            _directory = path
    return _directory


# ---- The environment --------------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(home: str, **changes: str) -> Iterator[None]:
    """Set environment variables, and put temporary files below `home`, for what runs or starts inside."""
    # torch._dynamo makes this directory as soon as the first optimizer exists, in /tmp and for ever
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(home, "inductor"))
    changes |= {"TMPDIR": home, "TORCHINDUCTOR_CACHE_DIR": inductor}
    saved = {name: os.environ.get(name) for name in changes}
    saved_tempdir, tempfile.tempdir = tempfile.tempdir, home
    os.environ.update(changes)
    try:
        yield
    finally:
        tempfile.tempdir = saved_tempdir
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---- The fork server --------------------------------------------------------------------------------------


def fork_server_fits(home: str) -> bool:
    """Say whether the fork server's socket can live below `home`: a socket's path has at most 107 bytes."""
    return len(os.fsencode(home)) + SOCKET_NAME <= 107


def start_fork_server() -> None:
    """Start the fork server, if none is running; return at once, while it imports torch on another core."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    ours = os.pathsep.join(filter(None, sys.path))  # Python 3.11 tells the server of sys.path, and it does not listen
    with environment(directory(), PYTHONPATH=ours), signals_blocked():
        forkserver.ensure_running()
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if _cleanup and _cleanup.stdin:  # there is one if `directory` was called, as it must be
            _cleanup.stdin.write(f"{server}\n")


# ---- Signals ----------------------------------------------------------------------------------------------

STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
BURST = 2.0  # seconds; an interrupted notebook sends SIGINT, SIGHUP, SIGCONT, SIGINT and SIGKILL within one
_raised = -BURST  # when (time.monotonic) a signal last became an exception
_held: list[int] | None = None


class Stopped(SystemExit):
    """SIGTERM or SIGHUP came. name: for instance "SIGTERM". exit_code: 128 + the signal's number, as shells have it."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(self.exit_code)
        self.name = signal.Signals(number).name


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into an exception, so that `finally` runs; by default the last two skip it.

    Of several in a burst only the first one raises: the clean-up that it causes must not be interrupted by the next.
    May be nested.
    """
    global _raised
    numbers = [one for one in STOPPING if signal.getsignal(one) not in (None, signal.SIG_IGN)]  # nohup stays nohup
    with _handling(numbers, _stop) as before:
        if before:
            _raised = -BURST
        yield


@contextlib.contextmanager
def _handling(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[dict[int, Any]]:
    """Let `handler` take these signals while inside; yield the handlers before. Nothing but in the main thread."""
    here = threading.current_thread() is threading.main_thread()  # only this one may change handlers
    before = {number: signal.getsignal(number) for number in numbers if here}
    try:
        for number in before:
            signal.signal(number, handler)
        yield before
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold the signals of `stoppable` back while inside, and let the first of them raise afterwards."""
    global _held
    _held = []
    try:
        yield
    finally:
        held, _held = _held, None
        if held:
            _stop(held[0], None)


def _stop(number: int, _frame: Any) -> None:
    global _raised
    if _held is not None:
        _held.append(number)
    elif time.monotonic() - _raised >= BURST:
        _raised = time.monotonic()
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Keep the signals of `stoppable` from every process started inside, for good: terminals and schedulers send them
    to all. At Ctrl-C each would print a traceback of its imports, and ranks that are to save need the process that they
    are forked from. Ranks let SIGTERM through again, by which they are asked. This process gets all of them afterwards.
    """
    resource_tracker.ensure_running()  # not inside: it unblocks the signals after starting
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """From now on let no Ctrl-C and no hang-up disturb the end of this process; SIGTERM may still end it at once."""
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)


# ---- Being asked to stop ----------------------------------------------------------------------------------
# By SIGTERM, as schedulers send it before they take a machine away, Ctrl-C, or a closed terminal. Where ranks get time
# to save (`launch.run(..., stop_within=30)`), the signal becomes a note, which a rank reads between two steps. Then
# `launch.command` exits with 128 + its number, as shells have it: whoever started the run sees that it is not finished.

_asked = 0  # 128 + the first signal's number; 0: none has asked


@contextlib.contextmanager
def noting_stops(numbers: Sequence[int], patient: bool) -> Iterator[None]:
    """Note these signals while inside, instead of obeying them.

    patient: however often they come; else one that comes after the first one's burst is obeyed.
    """
    noted = time.monotonic()

    def handle(number: int, frame: Any) -> None:
        nonlocal noted
        if not _asked:
            noted = time.monotonic()
            note_stop(number)
        elif not patient and time.monotonic() - noted >= BURST:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)

    with _handling(numbers, handle) as before:
        yield


def note_stop(number: int) -> None:
    """Note that this signal has asked, if none has yet."""
    global _asked
    _asked = _asked or 128 + number


def forget_stop() -> None:
    """Forget who has asked: another run begins in this process."""
    global _asked
    _asked = 0


def stop_code() -> int:
    """Return the exit code of a process that was asked to stop, 128 + the signal's number; 0 if it was not."""
    return _asked
