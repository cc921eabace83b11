"""Small puzzles for the tests of the mechanism, at the top level of a module, where ranks find their trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmuon.launch import World
from muonbook.puzzles import Puzzle, bypassed, expect_tensor, insist


def call(world: World, solve: Callable[..., Any]) -> Any:
    """Hand the rank to the reader's function, and what it returns to the judge."""
    return solve(world.rank)


def call_and_meet(world: World, solve: Callable[..., Any]) -> Any:
    """As `call`, and then wait for all ranks in a collective of the trial's own."""
    import torch.distributed as dist

    found = solve(world.rank)
    dist.barrier()
    return found


def sum_with_the_ledger(world: World, solve: Callable[..., Any]) -> None:
    """Let the reader's function add ones up, with a group that records what it does."""
    import torch

    from distmuon.sharding.grid import Grid
    from distmuon.verify.counter import CollectiveCounter

    grid = Grid.of(world)
    with CollectiveCounter() as counter:
        found = solve(grid.world, torch.ones(3))
    insist(expect_tensor("total's result", found, [3], torch.float32), bypassed(counter, grid.ledger))


def _judge(evidence: list[Any]) -> list[str]:
    return [f"rank {rank} says {found!r}." for rank, found in enumerate(evidence) if found != "right"]


def _praise(evidence: list[Any]) -> str:
    return f"{len(evidence)} right."


def puzzle(trial: Callable[..., Any], ranks: int, function: str = "answer") -> Puzzle:
    return Puzzle("test", function, ranks, 1, trial, _judge, _praise, hints=("think.", "think harder."))


def ledger_puzzle() -> Puzzle:
    return Puzzle("sum", "total", 2, 1, sum_with_the_ledger, lambda _: [], lambda _: "recorded.", hints=())
