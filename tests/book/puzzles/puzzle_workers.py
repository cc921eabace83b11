"""Small puzzles for the tests of the mechanism, at the top level of a module, where ranks find their trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from muonbook import puzzles
from muonbook.puzzles import CaseReport, Puzzle, require_tensor

if TYPE_CHECKING:
    from distmuon.sharding.grid import Grid


def call(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Hand the rank to the reader's function, which is to return "right"."""
    rank = grid.world.rank
    found = solve(rank)
    yield CaseReport([f"rank {rank} says {found!r}." if found != "right" else ""])


def call_and_meet(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """As `call`, and then wait for all ranks in a collective of the trial's own."""
    import torch.distributed as dist

    reports = list(call(grid, solve))
    dist.barrier()
    yield from reports


def sum_with_the_ledger(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Let the reader's function add ones up, with a group that records what it does."""
    import torch

    found, _ = puzzles.call(grid, solve, grid.world, torch.ones(3))
    require_tensor("total's result", found, [3], torch.float32)
    yield CaseReport([])


def _praise(facts: list[list[Any]]) -> str:
    return f"{len(facts)} right."


def puzzle(trial: Callable[..., Any], ranks: int, function: str = "answer") -> Puzzle:
    return Puzzle(function, trial, _praise, ("think.", "think harder."), "Answer.", dp=ranks, told=2)


def ledger_puzzle() -> Puzzle:
    return Puzzle("total", sum_with_the_ledger, lambda _: "recorded.", hints=(), goal="Add up.", dp=2)
