"""Chapter 12's puzzle: read a profiler's trace of a real step, and count every collective once.

The solution is `profiler.count_once`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from muonbook.measure.profiler import count_once, profiled
from muonbook.puzzles import CaseReport, Puzzle, as_called, require

if TYPE_CHECKING:
    from distmuon.launch import World
    from distmuon.sharding.grid import Grid

__all__ = ["PUZZLE", "count_once"]
SIZES = (24, 1000)  # elements of the matrices' bucket, in two steps


def record_a_gather(world: World) -> list[dict[str, Any]]:
    """Return the two events that an all-gather of 6 bf16 elements per rank leaves in a rank's trace.

    Of each its name, and the shapes and dtypes of the tensors among its inputs.
    """
    import torch

    from distmuon.sharding.grid import Grid

    grid = Grid.of(world)
    with profiled() as events:
        grid.world.all_gather(torch.ones(6, dtype=torch.bfloat16), "momentum")
    found = []
    for event in events:
        if event.get("name") in ("c10d::_allgather_base_", "gloo:all_gather"):
            dims, types = (event["args"][key] for key in ("Input Dims", "Input type"))
            tensors = [n for n, size in enumerate(dims) if size]  # the other inputs differ between torch's versions
            args = {"Input Dims": [dims[n] for n in tensors], "Input type": [types[n] for n in tensors]}
            found.append({"name": event["name"], "args": args})
    return sorted(found, key=lambda event: str(event["name"]))


def trial(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Profile two steps' collectives; compare what the reader's function found with what the ledger says."""
    for number, size in enumerate(SIZES, start=1):
        grid.ledger.clear()
        with profiled() as events:
            step(grid, size)
        called: Counter[str] = Counter()
        for op, _, traffic in as_called(grid.ledger):
            called[op] += traffic.payload_bytes
        found = solve(events)
        wanted = "a dict {collective: bytes} is wanted."
        require(isinstance(found, dict), f"count_once returned {type(found).__name__}, and {wanted}")
        for op, count in found.items():
            good = isinstance(op, str) and isinstance(count, int)
            require(good, f"count_once returned {op!r}: {count!r}, and {wanted}")
        wrong = [
            f"step {number}, rank {grid.world.rank}: {mine:,} bytes of {op}, where {right:,} were called for."
            for op in sorted({*found, *called})
            if (mine := found.get(op, 0)) != (right := called[op])
        ]
        yield CaseReport([*wrong, ""][:1], sum(called.values()))


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


PUZZLE = Puzzle(
    function="count_once",
    trial=trial,
    praise=lambda facts: (
        f"{len(SIZES)} steps on {len(facts)} ranks, {sum(chain.from_iterable(facts)):,} bytes of payload, "
        "each counted once."
    ),
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
    goal="Count the bytes of every collective in a profiler's trace of a real step, each of them once.",
    dp=2,
    tp=2,
)
