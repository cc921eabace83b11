"""Chapter 13's puzzle: take a step that needs everybody's momentum, in a room too small for it.

The solution is `step_in_waves`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distmuon.sharding.ledger import ring_bytes
from muonbook.puzzles import CaseReport, Puzzle, call, first_difference, unless

if TYPE_CHECKING:
    import torch

    from distmuon.sharding.collectives import Group
    from distmuon.sharding.grid import Grid

RANKS = 4
ROOMS = ((24, 1024), (50, 320), (7, 64))  # elements in a shard, and bytes of room: for all, for 20 and for 4 of them
LR = 0.5  # a power of two: every product of the trial is exact


def trial(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Let the reader's function take one step in every room, under a StorageTracker."""
    import torch

    from distmuon.verify.memory_tracker import StorageTracker

    for size, room in ROOMS:
        whole = torch.arange(RANKS * size, dtype=torch.float32) * 2 + 1  # more than the 8 bits of a bf16
        parameters = 1000.0 * torch.ones(RANKS * size)
        wanted = parameters - LR * whole
        momentum = whole.view(RANKS, size)[grid.dp.rank].clone()
        with StorageTracker() as tracker:
            _, cost = call(grid, solve, grid.dp, momentum, parameters, LR, room)

        where = f"with shards of {size} elements and {room} bytes of room, rank {grid.dp.rank}"
        sentence = f"{where} has {{found}} at index {{0}} of the parameters, not {{wanted}}."
        calls = -(-size // min(size, room // (4 * RANKS)))  # a wave gathers 4 bytes of each element of its part
        enough = ring_bytes("all_gather", 4 * RANKS * size, RANKS)
        complaints = [
            first_difference(parameters, wanted, sentence),
            unless(
                tracker.peak <= room,
                f"over budget: {where} had {tracker.peak} bytes of new tensors alive at one moment. "
                "A tensor lives as long as a name, or a view that has a name, holds it.",
            ),
            unless(
                cost.calls <= calls, f"{where} made {cost.calls} collectives, and {calls} are enough: fill the room."
            )
            or unless(
                cost.sent_bytes <= enough,
                f"over budget: {where} sent {cost.sent_bytes} bytes, and {enough} are enough.",
            ),
        ]
        waves = f"{cost.calls} wave{'s' if cost.calls > 1 else ''}"
        yield CaseReport(complaints, f"{4 * RANKS * size} bytes of momentum through {tracker.peak} in {waves}")


PUZZLE = Puzzle(
    function="step_in_waves",
    trial=trial,
    praise=lambda facts: (
        f"every rank has the right parameters, and never had more than its room: {', '.join(facts[0])}."
    ),
    hints=(
        "Gather a part of every shard at a time. How many elements of each shard fit, if what is gathered is 4 bytes "
        "for each of them on each of the ranks?",
        "A gathered wave has rank 0's part first, then rank 1's. In the parameters these parts do not follow each "
        "other: view both as one row per rank, parameters.view(group.size, -1)[:, start:end].",
        "`x -= lr * y` makes `lr * y` first, a tensor as large as y; x.sub_(y, alpha=lr) makes none. And in "
        "`wave = group.all_gather(...)` the right side is made before the name lets go of the last: say `del wave`.",
    ),
    goal="Take a step that needs the momentum of all ranks within a fixed room for new tensors.",
    dp=RANKS,
)


# ---- The solution -----------------------------------------------------------------------------------------


def step_in_waves(
    group: Group,
    momentum: torch.Tensor,  # [n], this rank's shard, float32
    parameters: torch.Tensor,  # [group.size * n], float32, the same on every rank
    lr: float,
    room: int,
) -> None:
    """Take parameters -= lr * (everybody's momentum) in place.

    At most `room` bytes of new tensors are alive at a time.
    """
    rows = parameters.view(group.size, -1)
    part = room // (4 * group.size)
    for start in range(0, len(momentum), part):
        wave = group.all_gather(momentum[start : start + part], "momentum")
        rows[:, start : start + part].sub_(wave.view(group.size, -1), alpha=lr)
        del wave  # before the next one is made
