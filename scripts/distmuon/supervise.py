"""Start local ranks, watch them, and leave nothing behind: no process, no file, whoever dies.

Who dies                        Who cleans up
a rank raises, exits, is killed the launcher sees its sentinel, stops the others, names the first failure
the launcher: Ctrl-C, SIGTERM,  its handlers turn the signal into an exception; `finally` kills and removes
  SIGHUP (an interrupted notebook)
the launcher: SIGKILL           a thread in every rank waits for it, removes the directory, ends its own process;
                                the fork server ends when the last process that holds its pipe has

Every signal, exit code and record below was seen on Linux with torch 2.13 and gloo.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

GRACE = 1.0  # seconds that the others get, after the first failure, to fail by themselves and say why
PRELOAD = ["torch", "torch.distributed.device_mesh", "torch._dynamo"]  # every optimizer imports the last: 1 s, once


class WorldError(RuntimeError):
    """A rank failed. The message names the first failure and holds its traceback. rank: which, or None if unknown."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


def run_local(
    target: Callable[..., Any], arguments: tuple[Any, ...], size: int, start_method: str, timeout: float
) -> list[Any]:
    """Run `target(rank, directory, *arguments)` in `size` processes; return the results in rank order.

    start_method: "forkserver" (ranks are forked from a process that has imported torch, 2 s instead of 10 for eight
    ranks on two cores) or "spawn" (CUDA and macOS, where forking after those imports is not safe).
    timeout: seconds, only for the words of the error.
    """
    with session_directory() as session, _signals_as_exceptions():
        directory = tempfile.mkdtemp(prefix="world-", dir=session)
        with _rank_environment(session):
            if start_method == "forkserver":
                _start_fork_server()
            context = multiprocessing.get_context(start_method)
            ranks = [
                context.Process(target=_rank_process, args=(rank, directory, session, target, arguments))  # type: ignore[attr-defined]
                for rank in range(size)
            ]
            try:
                for process in ranks:
                    process.start()
                failure = _watch(ranks, directory, timeout)
                if failure:
                    raise failure
                return [_read(directory, "result", rank) for rank in range(size)]
            finally:
                for process in ranks:
                    if process.pid is not None:
                        process.kill()
                for process in ranks:
                    if process.pid is not None:
                        process.join()
                shutil.rmtree(directory, ignore_errors=True)


# ---- In a rank --------------------------------------------------------------------------------------------


def _rank_process(
    rank: int, directory: str, session: str, target: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the launcher decides
    threading.Thread(target=_end_with_launcher, args=(session,), daemon=True).start()
    try:
        _write(directory, "result", rank, target(rank, directory, *arguments))
    except BaseException:
        _write(directory, "failure", rank, (time.monotonic(), traceback.format_exc()))
        sys.stdout.flush()
        os._exit(1)  # not sys.exit: gloo's threads may hang in their destructors when a peer is gone


def _end_with_launcher(session: str) -> None:
    """Wait for the launching process to end, then end this one, even if it is blocked in a collective."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    shutil.rmtree(session, ignore_errors=True)
    os._exit(1)


# ---- In the launcher --------------------------------------------------------------------------------------


def _watch(ranks: list[Any], directory: str, timeout: float) -> WorldError | None:
    """Wait until every rank has left a result, or one has failed; return the error that names the first failure."""
    waiting = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while waiting:
        gone = [waiting.pop(sentinel) for sentinel in multiprocessing.connection.wait(list(waiting))]  # type: ignore[call-overload]
        if any(_read(directory, "result", rank, missing=False) is False for rank in gone):
            deadline = time.monotonic() + GRACE
            while waiting and time.monotonic() < deadline:
                for sentinel in multiprocessing.connection.wait(list(waiting), deadline - time.monotonic()):
                    waiting.pop(sentinel)  # type: ignore[call-overload]
            return _first_failure(ranks, directory, timeout, alive=sorted(waiting.values()))
    return None


def _first_failure(ranks: list[Any], directory: str, timeout: float, alive: list[int]) -> WorldError:
    """Tell the culprit from the victims, who all fail within a moment because a peer is gone.

    In this order: a rank ended by a signal; a rank that left without a word; ranks still running while the others
    timed out; otherwise the earliest traceback that does not complain of a lost connection.
    """
    failures = {r: found for r in range(len(ranks)) if (found := _read(directory, "failure", r, missing=None))}
    for rank, process in enumerate(ranks):
        if rank in alive or rank in failures:
            continue
        if process.exitcode and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            return WorldError(f"rank {rank} was killed by {name}; the other ranks were stopped.", rank)
        if _read(directory, "result", rank, missing=False) is False:
            return WorldError(
                f"rank {rank} left with exit code {process.exitcode} before finishing; the other ranks were stopped.",
                rank,
            )
    by_time = sorted(failures, key=lambda rank: failures[rank][0])
    if alive and any("imeout" in text or "imed out" in text for _, text in failures.values()):
        names = ", ".join(map(str, alive))
        waited = f"rank {by_time[0]} waited {timeout:g} s in a collective in which rank(s) {names} took no part"
        return WorldError(
            f"{waited}; every rank was stopped. Rank {by_time[0]} was here:\n{failures[by_time[0]][1]}", alive[0]
        )
    causes = [rank for rank in by_time if "onnection" not in failures[rank][1]] or by_time
    return WorldError(
        f"rank {causes[0]} failed first; the other ranks were stopped.\n{failures[causes[0]][1]}", causes[0]
    )


def _write(directory: str, kind: str, rank: int, value: Any) -> None:
    path = os.path.join(directory, f"{kind}-{rank}")
    with open(path + ".part", "wb") as file:
        pickle.dump(value, file)
    os.replace(path + ".part", path)  # a rank killed while writing leaves no half record


_REQUIRED = object()


def _read(directory: str, kind: str, rank: int, missing: Any = _REQUIRED) -> Any:
    try:
        with open(os.path.join(directory, f"{kind}-{rank}"), "rb") as file:
            return pickle.load(file)
    except FileNotFoundError:
        if missing is _REQUIRED:
            raise
        return missing


# ---- Surroundings -----------------------------------------------------------------------------------------

_session: str | None = None


@contextlib.contextmanager
def session_directory() -> Iterator[str]:
    """Yield this process's one temporary directory; it goes when the process does.

    It outlives a world because the fork server, which the next world reuses, keeps its socket in it.
    """
    global _session
    if _session is None or not os.path.isdir(_session):
        _session = tempfile.mkdtemp(prefix="distmuon-")
        # after multiprocessing's own clean-up at -100, which expects its part of the directory to be there
        multiprocessing.util.Finalize(None, shutil.rmtree, (_session, True), exitpriority=-200)
    # torch._dynamo makes this directory as soon as the first optimizer exists, in /tmp and for ever
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(_session, "inductor"))
    yield _session


@contextlib.contextmanager
def _rank_environment(session: str) -> Iterator[None]:
    """Set what processes started inside inherit: one OpenMP thread each, temporary files in `session`."""
    changes = {"OMP_NUM_THREADS": "1", "TMPDIR": session}
    saved = {name: os.environ.get(name) for name in changes}
    saved_tempdir, tempfile.tempdir = tempfile.tempdir, session
    os.environ.update(changes)
    try:
        yield
    finally:
        tempfile.tempdir = saved_tempdir
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _start_fork_server() -> None:
    """Start the fork server, if none is running; return at once, while it imports torch on another core."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    with _interrupts_ignored():  # it inherits this: Ctrl-C must not print a traceback of its imports
        forkserver.ensure_running()


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change handlers
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that `finally` runs; their default action skips it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: Any) -> None:
        sys.exit(128 + number)

    numbers = [signal.SIGTERM, signal.SIGHUP] if hasattr(signal, "SIGHUP") else [signal.SIGTERM]
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def process_start() -> float:
    """Return the wall-clock time (seconds) at which this process started, imports and interpreter included."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            running = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - running
    except OSError:
        return _IMPORTED  # no /proc (macOS): a few hundredths of a second late


_IMPORTED = time.time()
