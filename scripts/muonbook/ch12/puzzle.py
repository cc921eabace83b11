"""Chapter 12's puzzle: read a profiler's trace of a real step, and count every collective once.

The solution is `profiled.count_once`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from muonbook.measure.profiled import count_once, profiled
from muonbook.puzzles import Puzzle, insist

if TYPE_CHECKING:
    from distmuon.launch import World
    from distmuon.sharding.grid import Grid

__all__ = ["PUZZLE", "count_once"]
SIZES = (24, 1000)  # elements of the matrices' bucket, in two steps


def trial(world: World, solve: Callable[..., Any]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Profile two steps' collectives; return what the reader's function found, and what the ledger says."""
    from distmuon.sharding.grid import Grid

    grid, evidence = Grid.of(world), []
    for size in SIZES:
        grid.ledger.clear()
        with profiled() as events:
            step(grid, size)
        called: dict[str, int] = {}
        for (op, _), traffic in grid.ledger.by_collective().items():
            op = "all_to_all" if op == "reduce_scatter" else op  # on gloo that is how ours is called
            called[op] = called.get(op, 0) + traffic.payload_bytes
        found = solve(events)
        wanted = "a dict {collective: bytes} is wanted."
        insist("" if isinstance(found, dict) else f"count_once returned {type(found).__name__}, and {wanted}")
        for op, count in found.items():
            right = isinstance(op, str) and isinstance(count, int)
            insist("" if right else f"count_once returned {op!r}: {count!r}, and {wanted}")
        evidence.append((found, called))
    return evidence


def step(grid: Grid, size: int) -> None:
    """Send what a step of Muon sends (gradients of two buckets, norms, momentum in bf16, parameters); and broadcast.

    Momentum is gathered over all ranks and parameters over DP: no one factor makes outputs out of both kinds of shards.
    """
    import torch

    buckets = [torch.ones(size), torch.ones(6)]
    for bucket in buckets:
        grid.dp.reduce_scatter(bucket, torch.empty(len(bucket) // grid.dp.size), "gradients")
    grid.world.all_reduce(torch.ones(2, 5, dtype=torch.float64), "norms")
    grid.world.all_gather(torch.ones(size // grid.world.size, dtype=torch.bfloat16), "momentum")
    for bucket in buckets:
        grid.dp.all_gather(bucket[: len(bucket) // grid.dp.size], "parameters")
    grid.world.broadcast(torch.ones(3, 7), "data")


def judge(evidence: list[Any]) -> list[str]:
    """Return what is wrong with the first count that is."""
    wrong = []
    for rank, seen in enumerate(evidence):
        for number, (found, called) in enumerate(seen, start=1):
            for op in sorted({*found, *called}):
                mine, right = found.get(op, 0), called.get(op, 0)
                if mine != right:
                    compared = f", {mine / right:.3g} times as many" if right else ""
                    wrong.append(
                        f"step {number}, rank {rank}: {mine:,} bytes of {op}{compared}; really called for: {right:,}."
                    )
    return wrong[:1]


def praise(evidence: list[Any]) -> str:
    sizes = sum(sum(called.values()) for seen in evidence for _, called in seen)
    return f"{len(SIZES)} steps on {len(evidence)} ranks, {sizes:,} bytes of payload, each counted once."


PUZZLE = Puzzle(
    name="count once",
    function="count_once",
    dp=2,
    tp=2,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "Every collective left two records: `c10d::...` on the thread that called it, cat `cpu_op`, and `gloo:...` "
        "on the thread that carried it out. Which of the two knows how long a *gathered* output is?",
        "Of `c10d::_allgather_base_` the payload is input 0, the output; of `c10d::alltoall_base_` it is input 1. "
        "`c10d::allreduce_` and `c10d::broadcast_` take a list: their dims are nested once more, and their type says "
        "just `TensorList`.",
        "What the list hides, the annotation tells: for an all-reduce or a broadcast, `gloo:all_reduce` and "
        "`gloo:broadcast` have dims and type of the very tensor, and there is one of them per call. So: all-gathers "
        "and all-to-alls from `c10d::`, all-reduces and broadcasts from `gloo:`.",
    ),
)
