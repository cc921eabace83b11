"""Chapter 13's puzzle: take a step that needs everybody's momentum, in a room too small for it.

The solution is `step_in_waves`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from distmuon.sharding.ledger import ring_bytes
from muonbook.puzzles import Puzzle, bypassed, first_difference, insist

if TYPE_CHECKING:
    import torch

    from distmuon.launch import World
    from distmuon.sharding.collectives import Group

RANKS = 4
TRIALS = ((24, 1024), (50, 320), (7, 64))  # elements in a shard, and bytes of room: for all, for 20 and for 4 of them
LR = 0.5  # a power of two: every product of the trial is exact


class Seen(NamedTuple):
    """What one rank saw in one trial: parameters and the right ones, the peak, and what was sent."""

    size: int
    room: int
    found: list[float]
    wanted: list[float]
    peak: int
    sent_bytes: int
    calls: int


def trial(world: World, solve: Callable[..., Any]) -> list[Seen]:
    """Let the reader's function take one step in every room, under a StorageTracker."""
    import torch

    from distmuon.sharding.grid import Grid
    from distmuon.verify.counter import CollectiveCounter
    from distmuon.verify.storage_tracker import StorageTracker

    grid, seen = Grid.of(world), []
    for size, room in TRIALS:
        whole = torch.arange(RANKS * size, dtype=torch.float32) * 2 + 1  # more than the 8 bits of a bf16
        parameters = 1000.0 * torch.ones(RANKS * size)
        wanted = (parameters - LR * whole).tolist()
        momentum = whole[size * world.rank :][:size].clone()
        del whole
        grid.ledger.clear()
        with CollectiveCounter() as counter, StorageTracker() as tracker:
            solve(grid.dp, momentum, parameters, LR, room)
        insist(bypassed(counter, grid.ledger))
        total = grid.ledger.total()
        found = parameters.nan_to_num(nan=-1e30).tolist()
        seen.append(Seen(size, room, found, wanted, tracker.peak, total.sent_bytes, total.calls))
    return seen


def fewest_calls(size: int, room: int) -> int:
    """Return how many waves are needed: one gathers 4 bytes of each element of its part of all shards."""
    part = min(size, room // (4 * RANKS))
    return -(-size // part)


def judge(evidence: list[list[Seen]]) -> list[str]:
    """Return what is wrong: parameters first, then memory, then calls and bytes."""
    wrong, large, dear = [], [], []
    for rank, seen in enumerate(evidence):
        for one in seen:
            where = f"with shards of {one.size} elements and {one.room} bytes of room, rank {rank}"
            if (i := first_difference(one.found, one.wanted)) is not None:
                what = "a NaN" if one.found[i] == -1e30 else f"{one.found[i]:g}"
                wrong.append(f"{where} has {what} at index {i} of the parameters, not {one.wanted[i]:g}.")
            if one.peak > one.room:
                large.append(
                    f"over budget: {where} had {one.peak} bytes of new tensors alive at one moment. "
                    "A tensor lives as long as a name, or a view that has a name, holds it."
                )
            calls = fewest_calls(one.size, one.room)
            if one.calls > calls:
                dear.append(f"{where} made {one.calls} collectives, and {calls} are enough: fill the room.")
            if one.sent_bytes > (enough := ring_bytes("all_gather", 4 * RANKS * one.size, RANKS)):
                dear.append(f"over budget: {where} sent {one.sent_bytes} bytes, and {enough} are enough.")
    return [*wrong[:1], *large[:1], *dear[:1]]


def praise(evidence: list[list[Seen]]) -> str:
    """Return what was achieved, with the numbers of the run."""
    told = [
        f"{4 * RANKS * one.size} bytes of momentum through {one.peak} in {one.calls} wave{'s' * (one.calls > 1)}"
        for one in evidence[0]
    ]
    return f"every rank has the right parameters, and never had more than its room: {', '.join(told)}."


PUZZLE = Puzzle(
    name="a step in waves",
    function="step_in_waves",
    dp=RANKS,
    tp=1,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "Gather a part of every shard at a time. How many elements of each shard fit, if what is gathered is 4 bytes "
        "for each of them on each of the ranks?",
        "A gathered wave has rank 0's part first, then rank 1's. In the parameters these parts do not follow each "
        "other: view both as one row per rank, parameters.view(group.size, -1)[:, start:end].",
        "`x -= lr * y` makes `lr * y` first, a tensor as large as y; x.sub_(y, alpha=lr) makes none. And in "
        "`wave = group.all_gather(...)` the right side is made before the name lets go of the last: say `del wave`.",
    ),
)


# ---- The solution -----------------------------------------------------------------------------------------


def step_in_waves(group: Group, momentum: torch.Tensor, parameters: torch.Tensor, lr: float, room: int) -> None:
    """Take parameters -= lr * (everybody's momentum) in place, with at most `room` bytes of new tensors at a time.

    momentum: this rank's shard [n], float32. parameters: [group.size * n], float32, the same on every rank.
    """
    rows = parameters.view(group.size, -1)
    part = room // (4 * group.size)
    for start in range(0, len(momentum), part):
        wave = group.all_gather(momentum[start : start + part], "momentum")
        rows[:, start : start + part].sub_(wave.view(group.size, -1), alpha=lr)
        del wave  # before the next one is made
