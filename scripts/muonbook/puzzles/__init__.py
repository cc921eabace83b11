"""Puzzles: the reader writes one function, and a real world of ranks tries it.

    %%writefile my_05.py                                                      the starter, in a cell of the chapter
    !python ../scripts/05_processes_and_collectives.py --check my_05.py || true

A chapter's puzzle is a `Puzzle` in a module of this package, beside its solution. `check` runs the reader's function on
every rank, and answers in a sentence or two: what is wrong, on which rank, in which line of the reader's file.

torch is imported inside functions: a missing file, a slip of the keyboard or a starter that nobody has filled in yet is
answered before any process starts.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distmuon import launch
from distmuon.launch import rank, session, supervise
from muonbook.puzzles import _answer, _attempt

if TYPE_CHECKING:
    import torch

PATIENCE = 10.0  # seconds for a trial, which takes a fraction of one: a rank still at it then is stuck


@dataclass(frozen=True)
class Puzzle:
    """What to write, how it is tried, and what is said of it.

    name: "ring all-reduce". function: what the reader's file must define. dp, tp: the world that tries it.
    trial: `(world, function) -> evidence` on every rank, evidence being plain data; a function at the top level of its
        module, because ranks import it, and one that imports torch inside.
    judge: every rank's evidence, in rank order -> what is wrong, worst first; [] where the puzzle is solved.
    praise: every rank's evidence -> what the reader has achieved, with its numbers.
    hints: from a nudge to nearly the answer.
    """

    name: str
    function: str
    dp: int
    tp: int
    trial: Callable[[launch.World, Callable[..., Any]], Any]
    judge: Callable[[list[Any]], list[str]]
    praise: Callable[[list[Any]], str]
    hints: tuple[str, ...]


# ---- For a chapter's worker -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every worker with a puzzle takes."""
    parser.add_argument("--check", metavar="FILE", help="try the answer to this chapter's puzzle in FILE")
    parser.add_argument("--hint", type=int, metavar="N", help="show the puzzle's first N hints")


def handle(arguments: argparse.Namespace, puzzle: Puzzle) -> int | None:
    """Do what `--check` and `--hint` ask for; return the exit code, or None where the worker is to do its own work."""
    if arguments.hint is not None and arguments.hint < 1:
        raise launch.UsageError(f"--hint {arguments.hint}: hints are counted from 1 to {len(puzzle.hints)}.")
    code = None if arguments.check is None else check(puzzle, arguments.check)
    if arguments.hint is None:
        return code
    for number, hint in enumerate(puzzle.hints[: arguments.hint], start=1):
        print(f"Hint {number} of {len(puzzle.hints)}: {hint}")
    return code or 0


def check(puzzle: Puzzle, path: str | Path, patience: float = PATIENCE) -> int:
    """Try the answer in `path` and print the verdict; return 0 where it is solved, else 1.

    patience: seconds for each rank. Raises UsageError, before anything is started, where there is no such file.
    """
    if launch.under_torchrun():
        raise launch.UsageError("--check starts a world of its own; run it without torchrun.")
    answer = _answer.read(path)
    complaints = _answer.examine(answer, puzzle.function)
    if complaints:
        return _not_yet(complaints, [], puzzle)
    folder = tempfile.mkdtemp(prefix="puzzle-", dir=session.directory())
    try:
        evidence, failure = _run(puzzle, answer, folder, patience)
        records = _attempt.read_records(folder, puzzle.dp * puzzle.tp)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if failure is not None:
        complaints = [_attempt.explain(records, str(failure), answer.name, patience)]
    else:
        complaints = puzzle.judge(evidence)
    printed = [line for record in records if record is not None for line in record.printed]
    if complaints:
        return _not_yet(complaints, printed, puzzle)
    print(f"Solved: {puzzle.praise(evidence)}")
    _repeat(printed)
    return 0


# ---- For a puzzle's trial ---------------------------------------------------------------------------------

Unsolved = _attempt.Unsolved


def insist(*complaints: str) -> None:
    """Stop the trial, and give the first complaint that is not "" as the reason. For trials and what they hand out."""
    for complaint in filter(None, complaints):
        raise Unsolved(complaint)


def expect_tensor(name: str, found: object, shape: Iterable[int], dtype: torch.dtype) -> str:
    """Return what is wrong with `found`, which should be a tensor of this shape and dtype, or "".

    name: what the sentence calls it, such as "all_reduce's result".
    """
    import torch

    if not isinstance(found, torch.Tensor):
        what = (
            "nothing: is there a `return`?" if found is None else f"{_attempt.a(type(found).__name__)}, not a tensor."
        )
        return f"{name} is {what}"
    if tuple(found.shape) != tuple(shape):
        return f"{name} has shape {tuple(found.shape)}, and {tuple(shape)} is wanted."
    if found.dtype != dtype:
        return f"{name} is {_plain(found.dtype)}, and {_plain(dtype)} is wanted."
    return ""


def first_difference(found: Sequence[Any], wanted: Sequence[Any]) -> int | None:
    """Return the first index at which two sequences of one length differ, or None: the place to tell the reader of."""
    return next((i for i, (mine, right) in enumerate(zip(found, wanted, strict=True)) if mine != right), None)


def bypassed(counter: Any, ledger: Any) -> str:
    """Return what torch saw but the ledger did not (or the reverse), or "": the trial's ban on going around.

    counter: a `distmuon.verify.counter.CollectiveCounter` that was entered around the reader's function.
    ledger: a `distmuon.sharding.ledger.Ledger`: what the objects handed to the reader recorded meanwhile.
    """
    seen, recorded = _calls(counter.ledger), _calls(ledger)
    for op, group in dict.fromkeys([*seen, *recorded]):
        if seen[op, group] != recorded[op, group]:
            return (
                f"torch saw {seen[op, group]} {op} over {group}, the ledger {recorded[op, group]}: "
                "use the collectives that the function is given, so that every byte is recorded."
            )
    return ""


def _calls(ledger: Any) -> Counter[tuple[str, str]]:
    """Return calls per collective and group; on gloo our reduce-scatter is an all-to-all and a sum, so both are one."""
    calls: Counter[tuple[str, str]] = Counter()
    for (op, group), traffic in ledger.by_collective().items():
        calls["all_to_all" if op == "reduce_scatter" else op, group] += traffic.calls
    return calls


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- The run and the verdict ------------------------------------------------------------------------------


def _run(
    puzzle: Puzzle, answer: _answer.Answer, folder: str, patience: float
) -> tuple[list[Any], supervise.WorldError | None]:
    """Return every rank's evidence, or the failure. Also a world of one runs apart: it may have to be stopped."""
    size = puzzle.dp * puzzle.tp
    # a rank's own watch ends its trial after `patience` and knows where it was; gloo's clock must not forestall it
    limit = patience + launch.DEFAULT_TIMEOUT
    world = launch.World(0, size, puzzle.dp, puzzle.tp, "gloo", "cpu", limit, 1, session.process_start())
    given = (puzzle.trial, puzzle.function, answer.name, answer.text, folder, patience)
    method = "forkserver" if sys.platform == "linux" else "spawn"
    try:
        payload = pickle.dumps((_attempt.attempt, given))
        return supervise.run_local(rank.run_local, (world, payload), size, method, limit), None
    except supervise.WorldError as failure:
        return [], failure


def _not_yet(complaints: list[str], printed: list[str], puzzle: Puzzle) -> int:
    first, *more = (_tidy(complaint) for complaint in complaints[:2])
    print("\n".join([f"Not yet: {first}", *more]))
    if puzzle.hints:
        print(f"Stuck? Add --hint 1 for the first of {len(puzzle.hints)} hints.")
    _repeat(printed)
    return 1


def _tidy(text: str) -> str:
    """Return `text` without what differs from machine to machine: memory addresses, folders."""
    text = re.sub(r"\b0x[0-9a-fA-F]+", "0x...", text)
    return re.sub(rf"(?<![\w.:/]){re.escape(os.sep)}(?:[^\s/'\"]+/)+", "", text)


def _repeat(printed: list[str]) -> None:
    """Print what the reader's function has printed, in rank order."""
    if printed:
        print("\n".join(["Your function printed:", *printed]))
