"""Start local ranks, watch them, and leave nothing behind: no process, no file, whoever dies.

Who dies                          Who cleans up
a rank raises, exits, is killed   the launcher sees its sentinel, stops the others, names the first failure
the launcher: Ctrl-C, SIGTERM,    its handlers turn the first signal into an exception; `finally` kills and removes,
  SIGHUP, an interrupted notebook   and lets no second signal interrupt it
the launcher: SIGKILL             a thread in every rank waits for it and ends its own process, even when that is
                                  blocked in a collective; the session's shell kills the fork server and removes the
                                  directory
the fork server                   the launcher hears that every rank has left, and removes the world's directory; a rank
                                  whose directory is gone ends within a second

What remains: a rank that is stopped (SIGSTOP) outlives a killed launcher until it is continued; a rank's own children
are not followed; a launcher killed in the millisecond between making its directory and starting the shell leaves it.

Every signal, exit code and record below was seen on Linux with torch 2.13 and gloo.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from distmuon.launch import session
from distmuon.launch.cli import UsageError

GRACE = 1.0  # seconds that the others get, after the first failure, to fail by themselves and say why
PLUMBING = [os.path.join(os.path.dirname(__file__), name) for name in ("supervise.py", "rank.py")]  # left out of stacks
NO_GUARD, NO_ROOM = 197, 198  # exit codes of ranks, which nobody else is likely to choose: see `_explained`
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a file system says that takes no more
FORK_SERVER_GONE = 255  # the exit code that multiprocessing makes up when nobody can tell it the true one
SERVER_GONE = "the process that ranks are forked from has ended; every rank was stopped."
ANSWER = 0.5  # seconds that a rank which is still running gets to say where it is


RANK = "rank "  # how the names of its process begin


class WorldError(RuntimeError):
    """A rank failed. The message names the first failure and holds its traceback.

    rank: which, or None if unknown.
    """

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message.rstrip())
        self.rank = rank


class NoGuard(UsageError):
    """The program starts its world whenever it is imported, and every rank imports it."""


def end_where_the_program_begins_anew() -> None:
    """End this process, without a word, if it is a rank that still imports the program which has started it.

    To be called before anything is started. The launcher sees the exit code, and says what is missing.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False) and process.name.startswith(RANK):  # as multiprocessing itself asks
        os._exit(NO_GUARD)


def run_local(
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    size: int,
    start_method: str,
    timeout: float,
    stop_within: float | None = None,
) -> list[Any]:
    """Run `target(rank, directory, *arguments)` in `size` processes; return the results in rank order.

    start_method: "forkserver" (ranks are forked from a process that has imported torch, 2 s instead of 10 for eight
    ranks on two cores) or "spawn" (CUDA and macOS, where forking after those imports is not safe).
    timeout: seconds, only for the words of the error.
    stop_within: seconds that ranks get to return when this process is asked to stop, before they are stopped.
    """
    with session.stoppable():
        home = session.directory()
        directory = tempfile.mkdtemp(prefix="world-", dir=home)
        ranks: list[Any] = []
        try:
            with session.environment(home, OMP_NUM_THREADS="1"):
                forkserver = start_method == "forkserver" and session.fork_server_fits(home)
                if forkserver:
                    session.start_fork_server()
                context: Any = multiprocessing.get_context("forkserver" if forkserver else "spawn")
                # starting a rank takes milliseconds, except that the first one waits for the fork server's imports
                with contextlib.nullcontext() if forkserver else session.signals_blocked():
                    for rank in range(size):
                        given = (rank, directory, home, dict(os.environ), target, arguments)
                        ranks.append(context.Process(target=_rank_process, args=given, name=f"{RANK}{rank}"))
                        try:
                            ranks[-1].start()
                        except (EOFError, ConnectionError) as error:  # it took the order, or not even that
                            raise WorldError(SERVER_GONE, None) from error
            failure = _watch(ranks, directory, timeout, stop_within)
            if failure:
                raise _explained(ranks, home) or failure
            return [_read(directory, "result", rank) for rank in range(size)]
        finally:
            with session.undisturbed():
                _stop(ranks)
                shutil.rmtree(directory, ignore_errors=True)


def _explained(ranks: list[Any], home: str) -> Exception | None:
    """Return what a rank could only say by its exit code, if one did."""
    codes = [process.exitcode for process in ranks]
    if NO_GUARD in codes:
        program = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "this program")
        return NoGuard(
            f"{program} calls launch.run whenever it is imported, and every rank imports it; put the call, and "
            'whatever else only the command is to do, under `if __name__ == "__main__":`.'
        )
    if NO_ROOM in codes:
        rank = codes.index(NO_ROOM)
        remedy = f"make room in {os.path.dirname(home)}, or set TMPDIR to another folder"
        return WorldError(
            f"rank {rank} could not leave its result in the temporary folder, which is full; {remedy}.", rank
        )
    return None


def _stop(ranks: list[Any]) -> None:
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join(10)  # at once, unless somebody has stopped the fork server, which reports it


# ---- In a rank --------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """What a rank that raised leaves behind. lost: it only lost a peer. late: a collective did not end in time."""

    when: float
    lost: bool
    late: bool
    where: str  # outside installed packages, most recent call first
    text: str


def _rank_process(
    rank: int,
    directory: str,
    home: str,
    environment: dict[str, str],
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the launcher decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked where it was started: see `session`
    os.environ.clear()  # the fork server's environment is that of the first world
    os.environ.update(environment)
    threading.Thread(target=_end_with_launcher, args=(directory, home), daemon=True).start()
    try:
        stack = os.open(_path(directory, "stack", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)  # asked by the launcher
        faulthandler.enable(file=stack)  # and when C++ gives up: gloo aborts on collectives that do not match
        _write(directory, "result", rank, target(rank, directory, *arguments))
    except BaseException as error:
        code = 1
        try:
            _write(directory, "failure", rank, _failure(error))
            with contextlib.suppress(OSError):  # no room for what is printed is none of the temporary folder's
                sys.stdout.flush()
        except OSError as full:
            code = NO_ROOM if full.errno in FULL else 1
        finally:
            os._exit(code)  # not sys.exit: gloo's threads may hang in their destructors when a peer is gone


def _end_with_launcher(directory: str, home: str) -> None:
    """End this process when the launcher has ended, or has given this world up."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    while launcher.is_alive() and os.path.isdir(directory):
        launcher.join(1.0)
    if os.path.isdir(directory):  # a launcher that lives removes it before it lets go of its end of our pipe
        shutil.rmtree(home, ignore_errors=True)
    os._exit(1)


def _failure(error: BaseException) -> Failure:
    """Describe `error`; torch.distributed has no exceptions of its own for lost peers and timeouts, only words."""
    words = str(error) if isinstance(error, RuntimeError) else ""
    lost = re.search("Connection|connectFullMesh|Broken pipe", words) is not None
    late = re.search(r"Timed out waiting \d+ms|[Ww]ait timeout|operation timeout", words) is not None
    report = traceback.TracebackException.from_exception(error)
    while len(report.stack) > 1 and report.stack[0].filename in PLUMBING:
        del report.stack[0]
    ours = [frame for frame in report.stack if "site-packages" not in frame.filename] or report.stack[-1:]
    where = "\n".join(f'  File "{frame.filename}", line {frame.lineno} in {frame.name}' for frame in reversed(ours))
    return Failure(time.monotonic(), lost, late, where, "".join(report.format()).rstrip())


# ---- In the launcher --------------------------------------------------------------------------------------


def _watch(ranks: list[Any], directory: str, timeout: float, stop_within: float | None) -> WorldError | None:
    """Wait until every rank has left a result, or one has failed; return the error that names the first failure.

    A signal is passed on to the ranks where they get time to stop, and raises where they get none, or no more.
    """
    waiting: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(ranks)}
    interrupt: BaseException | None = None
    deadline = None
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            ended = multiprocessing.connection.wait(list(waiting), left)
        except (KeyboardInterrupt, session.Stopped) as signalled:
            if stop_within is None or interrupt is not None:
                raise
            interrupt, deadline = signalled, time.monotonic() + stop_within
            _ask_to_stop(ranks, signalled)
            continue
        gone = [waiting.pop(sentinel) for sentinel in ended]
        if interrupt is not None and (not gone or any(ranks[rank].exitcode == -signal.SIGTERM for rank in gone)):
            raise interrupt  # their time is up, or one of them was not listening yet
        if not all(_has(directory, "result", rank) for rank in gone):
            deadline = time.monotonic() + GRACE
            while waiting and time.monotonic() < deadline:
                for sentinel in multiprocessing.connection.wait(list(waiting), deadline - time.monotonic()):
                    waiting.pop(sentinel)
            return _first_failure(ranks, directory, timeout, alive=sorted(waiting.values()))
    return None


def _ask_to_stop(ranks: list[Any], signalled: BaseException) -> None:
    """Pass a signal on, and note it here, for the exit code."""
    number = signalled.exit_code - 128 if isinstance(signalled, session.Stopped) else signal.SIGINT
    session.note_stop(number)
    for process in ranks:
        process.terminate()


def _first_failure(ranks: list[Any], directory: str, timeout: float, alive: list[int]) -> WorldError:
    """Tell the culprit from the victims, who all fail within a moment because a peer is gone.

    In this order: a rank that left without a word; ranks that still run while another's collective timed out;
    otherwise the earliest failure that is not only the loss of a peer.
    """
    failures = {r: _read(directory, "failure", r) for r in range(len(ranks)) if _has(directory, "failure", r)}
    if not alive and all(process.exitcode == FORK_SERVER_GONE for process in ranks):
        return WorldError(SERVER_GONE, None)
    for rank, process in enumerate(ranks):
        if rank not in alive and rank not in failures and not _has(directory, "result", rank):
            code = process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            text = f"rank {rank} {how} before it had finished; the other ranks were stopped.\n"
            place = _place(directory, rank)
            return WorldError(text + (f"It was here (most recent call first):\n{place}" if place else ""), rank)
    by_time = sorted(failures, key=lambda rank: failures[rank].when)
    late = [rank for rank in by_time if failures[rank].late]
    causes = [rank for rank in by_time if not failures[rank].lost and not failures[rank].late]
    if late and not causes:
        text = f"rank {late[0]} waited {timeout:g} s for its peers in vain; every rank was stopped.\n"
        text += failures[late[0]].text + "\n"
        others = sorted(rank for rank in by_time if rank != late[0])
        for where in dict.fromkeys(failures[rank].where for rank in others):
            names = ", ".join(str(rank) for rank in others if failures[rank].where == where)
            text += f"\nrank {names} failed in a collective too, here (most recent call first):\n{where}\n"
        for rank, place in _where({rank: ranks[rank].pid for rank in alive}, directory).items():
            text += f"\nrank {rank} was still running, here (most recent call first):\n{place}\n"
        return WorldError(text, alive[0] if len(alive) == 1 else None)
    first = (causes or by_time)[0]
    return WorldError(f"rank {first} failed first; the other ranks were stopped.\n{failures[first].text}", first)


def _where(pids: dict[int, int], directory: str) -> dict[int, str]:
    """Return running ranks' Python stacks, down to the worker. A faulthandler answers even from inside C++."""
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + ANSWER
    places = dict.fromkeys(pids, "")
    while not all(places.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
        places = {rank: _place(directory, rank) for rank in pids}
    return {
        rank: place or "  it does not answer: it is stopped, or has not started yet" for rank, place in places.items()
    }


def _place(directory: str, rank: int) -> str:
    """Return what a rank's faulthandler wrote of the thread that runs the worker; nothing until it is complete."""
    with contextlib.suppress(FileNotFoundError), open(_path(directory, "stack", rank)) as file:
        for stack in file.read().split("\n\n"):
            if "_rank_process" in stack:
                frames = [line for line in stack.splitlines() if line.startswith("  File ")]
                return "\n".join(itertools.takewhile(lambda line: not any(p in line for p in PLUMBING), frames))
    return ""


def _path(directory: str, kind: str, rank: int) -> str:
    return os.path.join(directory, f"{kind}-{rank}")


def _has(directory: str, kind: str, rank: int) -> bool:
    return os.path.exists(_path(directory, kind, rank))


def _write(directory: str, kind: str, rank: int, value: Any) -> None:
    path = _path(directory, kind, rank)
    with open(path + ".part", "wb") as file:
        try:
            pickle.dump(value, file)
        except Exception as error:  # its words differ from one Python to the next
            raise TypeError(
                f"Python can't pickle what this rank returned ({error}); return plain data, arrays or tensors."
            ) from None
    os.replace(path + ".part", path)  # a rank killed while writing leaves no half record


def _read(directory: str, kind: str, rank: int) -> Any:
    with open(_path(directory, kind, rank), "rb") as file:
        return pickle.load(file)
