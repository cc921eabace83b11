"""Puzzles: the reader writes one function, and a real world of ranks tries it.

    %%writefile my_05.py                                                      the starter, in a cell of the chapter
    !python ../scripts/05_processes_and_collectives.py --check my_05.py || true

A chapter's puzzle is a `Puzzle` in the chapter's room, beside its solution. Its trial runs the reader's function on
every rank, case by case, and yields a `CaseReport` of each: what is wrong with the result, what it cost too much, in
sentences. `check` tells the reader the first of each kind.

torch is imported inside functions: a missing file, a slip of the keyboard or a starter that nobody has filled in yet is
answered before any process starts.
"""

from __future__ import annotations

import argparse
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distmuon import launch
from muonbook.puzzles import runner
from muonbook.puzzles.runner import Trial, Unsolved

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from distmuon.sharding.grid import Grid
    from distmuon.sharding.ledger import Ledger, Traffic

LINE = 92  # characters that the page shows of a line
PATIENCE = 20.0  # seconds for a trial, which takes a fraction of one: a rank still at it then is stuck


@dataclass(frozen=True)
class CaseReport:
    """What one rank has to say of one case.

    complaints: one of each kind that the puzzle knows, gravest kind first; "" where there is none.
    facts: plain data, of which the praise is made.
    """

    complaints: Sequence[str]
    facts: Any = None


@dataclass(frozen=True)
class Puzzle:
    """What to write, how it is tried, and what is said of it.

    function: what the reader's file must define.
    trial: `(grid, function) -> Iterator[CaseReport]` on every rank; a function at the top level of its module, because
        ranks import it, and one that imports torch inside.
    praise: every rank's facts, case by case -> what the reader has achieved, with its numbers.
    hints: from a nudge to nearly the answer.
    goal: what the function does, in one sentence that begins with a verb: the page of all puzzles says it.
    dp, tp: the world that tries it. told: how many complaints of one kind.
    """

    function: str
    trial: Trial
    praise: Callable[[list[list[Any]]], str]
    hints: tuple[str, ...]
    goal: str
    dp: int = 1
    tp: int = 1
    told: int = 1


# ---- For a chapter's worker -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every worker with a puzzle takes."""
    parser.add_argument("--check", metavar="FILE", help="try the answer to this chapter's puzzle in FILE")
    parser.add_argument("--hint", type=int, metavar="N", help="show the puzzle's first N hints")


def handle(arguments: argparse.Namespace, puzzle: Puzzle) -> int | None:
    """Do what `--check` and `--hint` ask for; return the exit code, or None where the worker is to do its own work."""
    asked = next((name for name in ("check", "hint") if name in arguments.given), None)
    if asked is not None:
        launch.chosen_job(arguments, {"--check": ("hint",), "--hint": ("check",)}, f"--{asked}")
    if arguments.hint is not None and arguments.hint < 1:
        raise launch.UsageError(f"--hint {arguments.hint}: hints are counted from 1 to {len(puzzle.hints)}.")
    code = None if arguments.check is None else check(puzzle, arguments.check)
    for number, hint in enumerate(puzzle.hints[: arguments.hint or 0], start=1):
        print(f"Hint {number} of {len(puzzle.hints)}: {hint}")
    return code if arguments.hint is None else code or 0


def check(puzzle: Puzzle, path: str | Path, patience: float = PATIENCE) -> int:
    """Try the answer in `path` and print the verdict; return 0 where it is solved, else 1.

    patience: seconds for each rank. Raises UsageError, before anything is started, where there is no such file.
    """
    if launch.under_torchrun():
        raise launch.UsageError("--check starts a world of its own; run it without torchrun.")
    answer = runner.read(path)
    reports: list[list[CaseReport]] = []
    printed: list[str] = []
    complaint = runner.examine(answer, puzzle.function)
    if not complaint:
        reports, complaint, printed = runner.run(puzzle.trial, puzzle.function, answer, puzzle.dp, puzzle.tp, patience)
    complaints = [complaint] if complaint else judge(reports, puzzle.told)
    if complaints:
        print("\n".join(map(in_lines, map(_tidy, [f"Not yet: {complaints[0]}", *complaints[1:2]]))))
        if puzzle.hints:
            print(f"Stuck? Add --hint 1 for the first of {len(puzzle.hints)} hints.")
    else:
        print(f"Solved: {puzzle.praise([[report.facts for report in cases] for cases in reports])}")
    if printed:
        print("\n".join(["Your function printed:", *printed]))
    return 1 if complaints else 0


def judge(reports: list[list[CaseReport]], told: int) -> list[str]:
    """Return what is wrong, gravest kind first: the first `told` complaints of each, in order of ranks and cases."""
    kinds = zip(*(report.complaints for report in chain.from_iterable(reports)), strict=True)
    return list(chain.from_iterable(list(dict.fromkeys(filter(None, kind)))[:told] for kind in kinds))


def in_lines(text: str) -> str:
    """Return a verdict in lines that the page shows whole, broken between words alone."""
    return textwrap.fill(text, LINE, break_on_hyphens=False)


def _tidy(text: str) -> str:
    """Return `text` without what differs from machine to machine: memory addresses, folders."""
    text = re.sub(r"\b0x[0-9a-fA-F]+", "0x...", text)
    return re.sub(rf"(?<![\w.:/]){re.escape(os.sep)}(?:[^\s/'\"]+/)+", "", text)


# ---- For a puzzle's trial ---------------------------------------------------------------------------------


def require(condition: bool, complaint: str) -> None:
    """Stop the trial with the complaint where the condition does not hold."""
    if not condition:
        raise Unsolved(complaint)


def call(grid: Grid, function: Callable[..., Any], *given: Any) -> tuple[Any, Traffic]:
    """Call the reader's function; return what it returns, and what it asked of the collectives it was given.

    Stops the trial where the function went around them. `grid.ledger` then holds the rows of this call alone.
    """
    from distmuon.verify.counter import CollectiveCounter

    grid.ledger.clear()
    with CollectiveCounter() as counter:
        found = function(*given)
    seen, recorded = _calls(counter.ledger), _calls(grid.ledger)
    for op, group in [*seen, *recorded]:
        require(
            seen[op, group] == recorded[op, group],
            f"torch saw {seen[op, group]} {op} over {group}, the ledger {recorded[op, group]}: "
            "use the collectives that the function is given, so that every byte is recorded.",
        )
    return found, grid.ledger.total()


def _calls(ledger: Ledger) -> Counter[tuple[str, str]]:
    return Counter((op, group) for op, group, traffic in as_called(ledger) for _ in range(traffic.calls))


def as_called(ledger: Ledger) -> Iterator[tuple[str, str, Traffic]]:
    """Yield (collective, group, traffic); on gloo our reduce-scatter is an all-to-all and a sum, so both are one."""
    for (op, group), traffic in ledger.by_collective().items():
        yield "all_to_all" if op == "reduce_scatter" else op, group, traffic


def each_operator(look: Callable[[str, str, Any], None]) -> TorchDispatchMode:
    """Return a context in which `look(namespace, operator, result)` sees all that torch carries out on this thread."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class EachOperator(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            look(func.namespace, func._schema.name.partition("::")[2], result)
            return result

    return EachOperator()


def require_tensor(name: str, found: object, shape: Iterable[int], dtype: torch.dtype) -> None:
    """Stop the trial where `found` is not a tensor of this shape and dtype.

    name: what the sentence calls it, such as "all_reduce's result".
    """
    import torch

    require(found is not None, f"{name} is nothing: is there a `return`?")
    kind = type(found).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    require(isinstance(found, torch.Tensor), f"{name} is {article} {kind}, not a tensor.")
    assert isinstance(found, torch.Tensor)
    given, wanted = tuple(found.shape), tuple(shape)
    require(given == wanted, f"{name} has shape {given}, and {wanted} is wanted.")
    complaint = f"{name} is {found.dtype}, and {dtype} is wanted."
    require(found.dtype == dtype, complaint.replace("torch.", ""))


def unless(condition: bool, complaint: str) -> str:
    """Return the complaint where the condition does not hold, else ""."""
    return "" if condition else complaint


def over_budget(where: str, cost: Traffic, bytes_enough: int, *, calls: str, sent: str) -> str:
    """Return what is wrong with more than one collective, or more bytes sent by this rank than are enough, or "".

    calls, sent: how the sentences about the one and about the other end.
    """
    if cost.calls > 1:
        return f"over budget: {where} made {cost.calls} collectives, and one is enough{calls}."
    if cost.sent_bytes > bytes_enough:
        return f"over budget: {where} sent {cost.sent_bytes} bytes{sent}"
    return ""


def first_difference(found: Tensor, wanted: Tensor, sentence: str, element: str = "{:g}") -> str:
    """Return `sentence` about the first element in which two tensors of one shape differ, or "".

    sentence: with {0}, {1} and so on for the place, {found} and {wanted}. element: how a found one is called.
    """
    places = (found != wanted).nonzero().tolist()
    if not places:
        return ""
    mine, right = (tensor[tuple(places[0])].item() for tensor in (found, wanted))
    return sentence.format(*places[0], found="a NaN" if mine != mine else element.format(mine), wanted=f"{right:g}")
