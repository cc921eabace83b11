"""Start a world: the same worker function as local processes, under torchrun, or as one process.

Which of the three follows from the surroundings. Under torchrun, RANK and WORLD_SIZE are set, and this process is one
rank. With dp * tp = 1 the worker runs right here, in a process group of its own, so that it may call what it calls on
many ranks. Otherwise ranks are local processes, watched by `supervise`, and this one need not import torch at all: what
is to be made of their results can be done in one more of them.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib.util
import os
import pickle
import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from distmuon.launch import rank, session, supervise
from distmuon.launch.cli import DEFAULT_TIMEOUT, OutputError, UsageError
from distmuon.launch.rank import Worker
from distmuon.launch.supervise import WorldError
from distmuon.launch.world import World, under_torchrun, validated

READER_LEFT = 141  # 128 + SIGPIPE: what a shell reports of a command whose output nobody reads any more


def run(
    worker: Worker,
    arguments: Sequence[Any] = (),
    *,
    dp: int = 1,
    tp: int = 1,
    backend: str = "gloo",
    device: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    threads: int = 1,
    before_joining: Callable[[], object] | None = None,
    stop_within: float | None = None,
    on_rank0_result: tuple[Worker, Sequence[Any]] | None = None,
) -> list[Any]:
    """Run `worker(world, *arguments)` on dp * tp ranks; return what each returned, in rank order.

    worker: a function at the top level of a module: other processes import it by name, which is why a function
        defined in a notebook cell cannot be one. Or that name itself, "package.module:function": then this process
        does not import it, and what it needs (torch: 2 s), before the ranks are on their way.
    arguments: what the worker gets besides the world; plain data that can be pickled.
    dp, tp: the grid's sizes, D and T.
    backend: "gloo", "nccl", or "auto": nccl if there are enough GPUs.
    device: "cpu" or "cuda"; None: cuda with nccl, else cpu.
    timeout: seconds that a collective may wait for a peer.
    threads: CPU threads per rank.
    before_joining: what every rank calls before it opens a socket; found by other processes as `worker` is.
    stop_within: seconds that ranks get to return after SIGTERM, Ctrl-C or a closed terminal. None: they are
        stopped at once. Under torchrun it is torchrun that ends its patience.
    on_rank0_result: (function, more): return only what `function(result, *more)` does, where result is what rank 0 has
        returned, or None where that is None. It is called when all local ranks have left, and in a process that is
        forked as they were: that one has torch, which takes this one 2 s to import. Its UsageError or OutputError is
        raised here.
    Under torchrun the list holds this rank's result only.
    Raises UsageError before anything is started; WorldError, naming the first failure, when a rank fails. A program
    that calls this without `if __name__ == "__main__":` around it ends here with one sentence and exit code 2.
    """
    supervise.end_where_the_program_begins_anew()
    for function in (worker, *((on_rank0_result[0],) if on_rank0_result else ())):
        _check_name(function)
    started = session.process_start()
    world = World(0, dp * tp, dp, tp, backend, device or "", timeout, threads, started, before_joining, stop_within)
    world = validated(world, int(os.environ["WORLD_SIZE"]) if under_torchrun() else None)
    session.forget_stop()
    if under_torchrun() or world.size == 1:
        result = (rank.run_under_torchrun if under_torchrun() else rank.run_alone)(world, worker, arguments)
        return [result if on_rank0_result is None else rank.go_on(result, *on_rank0_result)]
    try:
        return _run_locally(worker, arguments, world, on_rank0_result)
    except supervise.NoGuard as error:  # it lies in the program, whose author a traceback would lead astray
        sys.exit(_complain(error, 2))


def _run_locally(
    worker: Worker, arguments: Sequence[Any], world: World, on_rank0_result: tuple[Worker, Sequence[Any]] | None
) -> list[Any]:
    start_method = "forkserver" if world.device == "cpu" and sys.platform == "linux" else "spawn"
    how = (start_method, world.timeout, world.stop_within)
    given = (world, _pickled(worker, arguments))
    if world.before_joining is not None:
        _pickled(world.before_joining, ())  # which travels with the world: refused here, in a sentence
    if on_rank0_result is None:
        return supervise.run_local(rank.run_local, given, world.size, *how)
    sequel = _pickled(*on_rank0_result)
    sys.stdout.flush()  # before the other process prints
    packed, *_ = supervise.run_local(rank.run_and_pack, given, world.size, *how)
    [(result, error)] = supervise.run_local(rank.unpack_and_go_on, (world, packed, sequel), 1, *how)
    if error is not None:
        raise error
    return [result]


def command(main: Callable[[], int | None]) -> None:
    """Run a worker's `main` and exit: 0, or its own code; 2 after a UsageError; 1 after a WorldError or an OutputError,
    and where what it prints finds no room; 130 on Ctrl-C; 128 + the signal's number on SIGTERM or SIGHUP, even if its
    ranks have used their time to save; 141, without a word, when nobody reads the output any more (| head).
    """
    atexit.register(session.ignore_interrupts)  # a second Ctrl-C must find no half-closed interpreter to complain in
    # torchrun stops its ranks by SIGTERM, and a rank blocked in a collective could not run a Python handler
    with contextlib.nullcontext() if under_torchrun() else session.stoppable():
        try:
            code = main() or session.stop_code()
            sys.stdout.flush()  # here, not at the interpreter's end: a closed pipe is still an exception
        except UsageError as error:
            code = _complain(error, 2)
        except OutputError as error:
            code = _complain(error, 1)
        except (WorldError, OSError) as error:
            if _reader_left(error):
                code = READER_LEFT
            elif full := _no_room(error):
                code = _complain(full, 1)
            elif isinstance(error, WorldError):
                code = _complain(error, 1)
            else:
                raise
        except KeyboardInterrupt:
            code = _complain("interrupted; every rank was stopped.", 130)
        except session.Stopped as stopped:
            code = _complain(f"stopped by {stopped.name}; every rank was stopped.", stopped.exit_code)
        sys.exit(code)


def _complain(what: object, code: int) -> int:
    if not is_main_process():
        time.sleep(1)  # torchrun ends every rank as soon as one has left: rank 0 speaks first
        return code
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"error: {what}", file=sys.stderr, flush=True)
    return code


def _reader_left(error: Exception) -> bool:
    """Say whether `error`, here or in the rank that prints, means that standard output is closed, as after `| head`.

    If so, what is still buffered goes nowhere, or the interpreter would complain of it at its end.
    """
    broken = isinstance(error, BrokenPipeError) or str(error).rpartition("\n")[2].startswith("BrokenPipeError")
    watch = select.poll()
    watch.register(1, 0)  # only what poll reports unasked: an error, a hang-up
    if not broken or not watch.poll(0):
        return False
    _print_nothing_more()
    return True


def _no_room(error: Exception) -> str:
    """Return what to say where `error`, here or in the rank that prints, means that standard output is a full disk."""
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if not full and not str(error).rpartition("\n")[2].startswith(f"OSError: [Errno {errno.ENOSPC}]"):
        return ""
    try:
        os.write(1, b"\n")
    except OSError as again:
        _print_nothing_more()
        return f"what is printed cannot be written ({again.strerror}); send it where there is room, and run this again."
    return ""  # another file has none


def _print_nothing_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_main_process() -> bool:
    """Say whether this process prints, writes and draws: under torchrun rank 0 alone does."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def _check_name(worker: Worker) -> None:
    """Raise UsageError for a name that leads to no module, without importing that module."""
    if isinstance(worker, str):
        module, colon, function = worker.partition(":")
        try:
            spec = importlib.util.find_spec(module) if colon and function else None
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            raise UsageError(f"worker is {worker!r}; give a function, or the name of one, 'package.module:function'.")


def _pickled(worker: Worker, arguments: Sequence[Any]) -> bytes:
    """Return what every rank receives, or raise UsageError."""
    name = getattr(worker, "__qualname__", repr(worker))
    if getattr(worker, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise UsageError(f"{name} was defined in a notebook cell or at a prompt; ranks import it, so put it in a file.")
    try:
        return pickle.dumps((worker, tuple(arguments)))
    except Exception as error:
        raise UsageError(
            f"{name} and its arguments cannot be sent to other processes ({error}); "
            "use a function at the top level of a module, and plain data."
        ) from error
