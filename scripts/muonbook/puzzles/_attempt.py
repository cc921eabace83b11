"""One rank's attempt at a puzzle, what it leaves behind when it fails, and what the launcher reads out of that.

Every rank watches its own clock: where a trial does not end, each can say in which line of the reader's file it was,
whether it computed or waited in a collective. Each leaves one record, and the first one it writes stands.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muonbook.puzzles import _answer

if TYPE_CHECKING:
    from distmuon.launch import World

OTHERS = 0.4  # seconds that a rank stays after its failure, so that the others can meet their own before they lose it
LINES = 12  # of what a rank's function prints are repeated
LOST = "Connection|connectFullMesh|Broken pipe|closed by"  # a peer has gone: a consequence, never the cause
CALLED = re.compile(r"distmuon|torch.distributed")  # in a frame's file: what a reader's function waits in


class Unsolved(Exception):
    """The reader's function did something that the puzzle rules out; the message is the complaint."""


@dataclass(frozen=True)
class Record:
    """How a rank's attempt ended.

    kind: "returned", "unwritten", "unsolved", "raised", "lost", "waiting" (in a collective) or "busy".
    words: the complaint or the exception. line: where in the reader's file, if there. printed: by the reader's code.
    """

    kind: str
    words: str
    line: int | None
    printed: tuple[str, ...]


# ---- In a rank --------------------------------------------------------------------------------------------


def attempt(
    world: World, trial: Callable[..., Any], function: str, name: str, text: str, folder: str, patience: float
) -> Any:
    """Run the trial of `function` from the reader's file on this rank; return its evidence."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's last words name files of the machine that built torch
    printed, lock = io.StringIO(), threading.Lock()
    own_thread = threading.get_ident()

    def leave(kind: str, words: str = "", line: int | None = None) -> None:
        path = os.path.join(folder, str(world.rank))
        with lock:
            if not os.path.exists(path):
                record = Record(kind, words, line, tuple(_excerpt(printed.getvalue(), world)))
                with open(path + ".part", "wb") as file:
                    pickle.dump(record, file)
                os.replace(path + ".part", path)

    def give_up() -> None:
        leave(*_whereabouts(sys._current_frames()[own_thread], name, text))
        time.sleep(OTHERS)
        os._exit(1)

    if world.size > 1:
        import torch.distributed as dist

        dist.barrier()  # start together, so that the watches agree
    watch = threading.Timer(patience, give_up)
    watch.daemon = True
    watch.start()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            found = _answer.load(_answer.Answer(name, text), function)
            if found is None:
                raise Unsolved(_answer.missing(name, function, []))
            evidence = trial(world, found)
            pickle.dumps(evidence)  # or it could not be handed over
    except BaseException as error:
        leave(*_account(error, name, function))
        time.sleep(OTHERS)
        raise
    watch.cancel()
    leave("returned")
    return evidence


def _account(error: BaseException, name: str, function: str) -> tuple[str, str, int | None]:
    """Return the kind, the words and the line of a failure."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    line = lines[-1] if lines else None
    if isinstance(error, NotImplementedError) and line is not None and not str(error):
        return "unwritten", _answer.unwritten(function), line
    if isinstance(error, Unsolved):
        return "unsolved", str(error), line
    if isinstance(error, RuntimeError) and re.search(LOST, str(error)):
        return "lost", "", line
    if isinstance(error, SystemExit):
        return "raised", "it called exit()", line
    said = str(error).strip().splitlines()
    words = type(error).__name__ + (f": {said[0][:200]}" if said else "")
    return "raised", words, line


def _whereabouts(frame: Any, name: str, text: str) -> tuple[str, str, int | None]:
    """Return whether a stack waits for other ranks or computes, and where in the reader's file."""
    waiting = False
    while frame is not None and frame.f_code.co_filename != name:
        waiting = waiting or CALLED.search(frame.f_code.co_filename) is not None
        frame = frame.f_back
    if frame is None:
        return "waiting", "", None  # in the trial's own collectives
    waiting = waiting or ".wait(" in text.splitlines()[frame.f_lineno - 1]  # written in C++, it has no frame
    return "waiting" if waiting else "busy", "", frame.f_lineno


def _excerpt(text: str, world: World) -> Iterator[str]:
    lines = text.splitlines()
    for line in lines[:LINES]:
        yield f"rank {world.rank}: {line}" if world.size > 1 else line
    if len(lines) > LINES:
        yield f"rank {world.rank}: ... and {len(lines) - LINES} lines more"


# ---- In the launcher --------------------------------------------------------------------------------------


def read_records(folder: str, size: int) -> list[Record | None]:
    """Return every rank's record, in rank order; None for a rank that could not leave one."""
    records: list[Record | None] = []
    for rank in range(size):
        path = os.path.join(folder, str(rank))
        if not os.path.exists(path):
            records.append(None)
            continue
        with open(path, "rb") as file:
            records.append(pickle.load(file))
    return records


def explain(records: list[Record | None], failure: str, name: str, patience: float) -> str:
    """Return why the world failed, in one or two sentences. failure: the launcher's own words."""
    size = len(records)
    for kind in ("unwritten", "raised", "unsolved"):
        found = {rank: record for rank, record in enumerate(records) if record is not None and record.kind == kind}
        if found:
            first = next(iter(found.values()))
            alike = [rank for rank, record in found.items() if (record.words, record.line) == (first.words, first.line)]
            place = f" ({name}, line {first.line})" if first.line else ""
            return _sentence(f"{_who(alike, size)}{first.words.rstrip('.')}{place}")
    stuck = {(r.kind, r.line) for r in records if r is not None and r.kind in ("waiting", "busy")}
    if stuck:
        return _stuck(records, sorted(stuck, key=lambda at: (at[0] == "busy", at[1] or sys.maxsize)), name, patience)
    # gloo ends the process where two ranks' messages do not fit each other
    line = re.search(rf'File "(?:[^"]*/)?{re.escape(name)}", line (\d+)', failure)
    place = f" It was in {name}, line {line[1]}: do all ranks hand over the same shape and dtype there?" if line else ""
    return _sentence(failure.splitlines()[0]) + place


def _stuck(records: list[Record | None], stuck: list[tuple[str, int | None]], name: str, patience: float) -> str:
    """Return who waited for whom, ranks at the same place together, those that waited first."""
    size, parts = len(records), []
    for kind, line in stuck:
        ranks = [
            r for r, record in enumerate(records) if record is not None and (record.kind, record.line) == (kind, line)
        ]
        place = f"in {name}, line {line}" if line else "after your function"
        did = "waited in vain for the others" if kind == "waiting" and size > 1 else "was still computing"
        parts.append(f"{_names(ranks, size)} {_plural(did, ranks, size)} {place}")
    returned = [rank for rank, record in enumerate(records) if record is not None and record.kind == "returned"]
    if returned:
        parts.append(f"{_names(returned, size)} had already returned")
    lesson = " All ranks must make the same calls." if size > 1 and any(kind == "waiting" for kind, _ in stuck) else ""
    return f"stopped after {patience:g} s: {'; '.join(parts)}.{lesson}"


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


def _plural(did: str, ranks: list[int], size: int) -> str:
    return did.replace("was ", "were ") if 1 < len(ranks) < size else did


def _who(ranks: list[int], size: int) -> str:
    return "" if size == 1 else f"{_names(ranks, size)}: "


def a(noun: str) -> str:
    """Return a noun with its article."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun
