"""The reader's file, and every rank's attempt with it: what can be said before a rank is started, and what went wrong.

Every rank watches its own clock: where a trial does not end, each can say in which line of the reader's file it was,
whether it computed or waited in a collective. Each leaves one record, and the first one it writes stands.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import os
import pickle
import re
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from distmuon import launch
from distmuon.launch import rank, session, supervise

OTHERS = 0.4  # seconds that a rank stays after its failure, so that the others can meet their own before they lose it
LINES = 12  # of what a rank's function prints are repeated
LOST = "Connection|connectFullMesh|Broken pipe|closed by"  # a peer has gone: a consequence, never the cause
CALLED = re.compile(r"distmuon|torch.distributed")  # in a frame's file: what a reader's function waits in

# (grid, the reader's function) -> what a rank has to say, case by case; picklable, and at the top level of its module
Trial = Callable[..., Iterator[Any]]


class Unsolved(Exception):
    """The reader's function did something that the puzzle rules out; the message is the complaint."""


class AnswerFile(NamedTuple):
    """name: the file's own, without folders, because that is all a message may say. text: its source."""

    name: str
    text: str


class AttemptRecord(NamedTuple):
    """How a rank's attempt ended.

    kind: "returned", "unwritten", "unsolved", "raised", "lost", "waiting" (in a collective) or "busy".
    words: the complaint or the exception. line: where in the reader's file, if there. printed: by the reader's code.
    """

    kind: str
    words: str
    line: int | None
    printed: tuple[str, ...]


# ---- The file ---------------------------------------------------------------------------------------------


def read(path: str | Path) -> AnswerFile:
    """Return the reader's file. Raises UsageError where it is not there or is not text."""
    path = Path(path)
    if not path.is_file():
        raise launch.UsageError(
            f"--check {path}: there is no such file; run the cell that begins with %%writefile first."
        )
    try:
        return AnswerFile(path.name, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise launch.UsageError(f"--check {path}: this is not a Python file in UTF-8.") from error


def examine(answer: AnswerFile, function: str) -> str:
    """Return what keeps the file from being tried: a syntax error, no such function, a starter as it was handed out."""
    try:
        tree = ast.parse(answer.text)
        compile(tree, answer.name, "exec")
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        return f"Python cannot read {answer.name}{line}: {what}."
    names = list(_bindings(tree))
    if function not in names and "*" not in names:
        return _missing(answer.name, function, names)
    last = next((node for node in reversed(tree.body) if getattr(node, "name", "") == function), None)
    if isinstance(last, ast.FunctionDef) and _is_starter(last):
        return f"{_unwritten(function)} ({answer.name}, line {last.body[-1].lineno})."
    return ""


def _load(answer: AnswerFile, function: str) -> Any:
    """Run the file as a module and return its function; None where it defines no such thing."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses look their module up
    exec(compile(answer.text, answer.name, "exec"), module.__dict__)
    found = getattr(module, function, None)
    return found if callable(found) else None


def _missing(name: str, function: str, names: list[str]) -> str:
    """Return the complaint that the file has no such function, with the one that may have been meant."""
    close = difflib.get_close_matches(function, names, n=1)
    return f"{name} defines no {function}." + (f" Is {close[0]} what you meant by it?" if close else "")


def _unwritten(function: str) -> str:
    return f"{function} is not written yet: it still raises NotImplementedError"


def _is_starter(function: ast.FunctionDef) -> bool:
    """Return whether nothing stands in the function but documentation and `raise NotImplementedError`."""
    *documented, last = function.body
    if any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in documented):
        return False
    return re.fullmatch(r"raise NotImplementedError(\(.*\))?", ast.unparse(last), re.DOTALL) is not None


def _bindings(tree: ast.Module) -> Iterator[str]:
    """Yield every name that the file may bind for others to see; "*" for an import of everything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


# ---- In a rank --------------------------------------------------------------------------------------------


def attempt(
    world: launch.World, trial: Trial, function: str, answer: AnswerFile, folder: str, patience: float
) -> list[Any]:
    """Run the trial of `function` from the reader's file on this rank; return what it yields."""
    import torch.distributed as dist

    from distmuon.sharding.grid import Grid

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's last words name files of the machine that built torch
    printed, lock = io.StringIO(), threading.Lock()
    own_thread = threading.get_ident()

    def leave(kind: str, words: str = "", line: int | None = None) -> None:
        path = Path(folder, str(world.rank))
        with lock:
            if not path.exists():
                record = AttemptRecord(kind, words, line, tuple(_excerpt(printed.getvalue(), world)))
                path.with_suffix(".part").write_bytes(pickle.dumps(record))
                path.with_suffix(".part").replace(path)

    def give_up() -> None:
        leave(*_whereabouts(sys._current_frames()[own_thread], answer))
        time.sleep(OTHERS)
        os._exit(1)

    grid = Grid.of(world)
    if world.size > 1:
        dist.barrier()  # start together, so that the watches agree
    watch = threading.Timer(patience, give_up)
    watch.daemon = True
    watch.start()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            found = _load(answer, function)
            if found is None:
                raise Unsolved(_missing(answer.name, function, []))
            yielded = list(trial(grid, found))
            pickle.dumps(yielded)  # or it could not be handed over
    except BaseException as error:
        leave(*_account(error, answer.name, function))
        time.sleep(OTHERS)
        raise
    watch.cancel()
    leave("returned")
    return yielded


def _account(error: BaseException, name: str, function: str) -> tuple[str, str, int | None]:
    """Return the kind, the words and the line of a failure."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    line = lines[-1] if lines else None
    if isinstance(error, NotImplementedError) and line is not None and not str(error):
        return "unwritten", _unwritten(function), line
    if isinstance(error, Unsolved):
        return "unsolved", str(error), line
    if isinstance(error, RuntimeError) and re.search(LOST, str(error)):
        return "lost", "", line
    if isinstance(error, SystemExit):
        return "raised", "it called exit()", line
    said = str(error).strip().splitlines()
    words = type(error).__name__ + (f": {said[0][:200]}" if said else "")
    return "raised", words, line


def _whereabouts(frame: Any, answer: AnswerFile) -> tuple[str, str, int | None]:
    """Return whether a stack waits for other ranks or computes, and where in the reader's file."""
    waiting = False
    while frame is not None and frame.f_code.co_filename != answer.name:
        waiting = waiting or CALLED.search(frame.f_code.co_filename) is not None
        frame = frame.f_back
    if frame is None:
        return "waiting", "", None  # in the trial's own collectives
    waiting = waiting or ".wait(" in answer.text.splitlines()[frame.f_lineno - 1]  # written in C++, it has no frame
    return "waiting" if waiting else "busy", "", frame.f_lineno


def _excerpt(text: str, world: launch.World) -> Iterator[str]:
    lines = text.splitlines()
    for line in lines[:LINES]:
        yield f"rank {world.rank}: {line}" if world.size > 1 else line
    if len(lines) > LINES:
        yield f"rank {world.rank}: ... and {len(lines) - LINES} lines more"


# ---- In the launcher --------------------------------------------------------------------------------------


def run(
    trial: Trial, function: str, answer: AnswerFile, dp: int, tp: int, patience: float
) -> tuple[list[list[Any]], str, list[str]]:
    """Let every rank of a world try the file; return what their trials yield, what went wrong or "", what they printed.

    patience: seconds for each rank. Also a world of one runs apart: it may have to be stopped.
    """
    size, failed = dp * tp, ""
    yielded: list[list[Any]] = []
    # a rank's own watch ends its trial after `patience` and knows where it was; gloo's clock must not forestall it
    limit = patience + launch.DEFAULT_TIMEOUT
    world = launch.World(0, size, dp, tp, "gloo", "cpu", limit, 1, session.process_start())
    method = "forkserver" if sys.platform == "linux" else "spawn"
    with tempfile.TemporaryDirectory("", "puzzle-", session.directory(), ignore_cleanup_errors=True) as folder:
        payload = pickle.dumps((attempt, (trial, function, answer, folder, patience)))
        try:
            yielded = supervise.run_local(rank.run_local, (world, payload), size, method, limit)
        except supervise.WorldError as failure:
            failed = str(failure)
        left = [Path(folder, str(number)) for number in range(size)]
        records = [pickle.loads(path.read_bytes()) if path.exists() else None for path in left]
    printed = [line for record in records if record is not None for line in record.printed]
    return yielded, failed and _explain(records, failed, answer.name, patience), printed


def _explain(records: list[AttemptRecord | None], failure: str, name: str, patience: float) -> str:
    """Return why the world failed, in one or two sentences. failure: the launcher's own words."""
    size = len(records)
    for kind in ("unwritten", "raised", "unsolved"):
        first = next((record for record in records if record is not None and record.kind == kind), None)
        if first is not None:
            alike = _ranks(records, kind=kind, words=first.words, line=first.line)
            who = f"{_names(alike, size)}: " if size > 1 else ""
            place = f" ({name}, line {first.line})" if first.line else ""
            return _sentence(f"{who}{first.words.rstrip('.')}{place}")
    stuck = {(r.kind, r.line) for r in records if r is not None and r.kind in ("waiting", "busy")}
    if stuck:
        return _stuck(records, sorted(stuck, key=lambda at: (at[0] == "busy", at[1] or sys.maxsize)), name, patience)
    # gloo ends the process where two ranks' messages do not fit each other
    line = re.search(rf'File "(?:[^"]*/)?{re.escape(name)}", line (\d+)', failure)
    place = f" It was in {name}, line {line[1]}: do all ranks hand over the same shape and dtype there?" if line else ""
    return _sentence(failure.splitlines()[0]) + place


def _stuck(records: list[AttemptRecord | None], stuck: list[tuple[str, int | None]], name: str, patience: float) -> str:
    """Return who waited for whom, ranks at the same place together, those that waited first."""
    size, parts = len(records), []
    for kind, line in stuck:
        ranks = _ranks(records, kind=kind, line=line)
        place = f"in {name}, line {line}" if line else "after your function"
        were = "were" if 1 < len(ranks) < size else "was"
        did = "waited in vain for the others" if kind == "waiting" and size > 1 else f"{were} still computing"
        parts.append(f"{_names(ranks, size)} {did} {place}")
    returned = _ranks(records, kind="returned")
    if returned:
        parts.append(f"{_names(returned, size)} had already returned")
    lesson = " All ranks must make the same calls." if size > 1 and any(kind == "waiting" for kind, _ in stuck) else ""
    return f"stopped after {patience:g} s: {'; '.join(parts)}.{lesson}"


def _ranks(records: list[AttemptRecord | None], **like: object) -> list[int]:
    """Return the ranks whose records have these values."""
    return [number for number, record in enumerate(records) if record and like.items() <= record._asdict().items()]


def _sentence(words: str) -> str:
    return words if words.endswith((".", "?", "!")) else words + "."


def _names(ranks: list[int], size: int) -> str:
    if size == 1:
        return "your function"
    if len(ranks) == size:
        return "every rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
