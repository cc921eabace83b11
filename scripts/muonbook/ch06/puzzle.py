"""Chapter 06's puzzle: write the step of a sharded optimizer, SGD with momentum, on plain flat tensors.

The solution is `sharded_step`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distmuon.sharding.ledger import ring_bytes
from muonbook.puzzles import CaseReport, Puzzle, call, first_difference, require, require_tensor, unless

if TYPE_CHECKING:
    import torch

    from distmuon.sharding.collectives import Group
    from distmuon.sharding.grid import Grid

RANKS, STEPS = 4, 3
LENGTHS = (8, 10, 3)  # shared evenly among 4 ranks, not evenly, and fewer elements than ranks
MU, LR = 0.5, 0.25  # powers of two: every sum and product of the trial is exact


def trial(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Take a few steps with every length; the rank's own results and state go into its next step."""
    import torch

    for length in LENGTHS:
        where, shard = f"with {length} elements, rank {grid.dp.rank}", -(-length // RANKS)
        allowed = sum(ring_bytes(op, 4 * RANKS * shard, RANKS) for op in ("reduce_scatter", "all_gather"))
        parameters = 100.0 * torch.arange(1, length + 1)
        wanted, momentum = parameters.clone(), torch.zeros(length)
        state: dict[str, Any] = {}
        for step in range(STEPS):
            gradients = [synthetic(length, step, rank) for rank in range(RANKS)]
            momentum = MU * momentum + torch.stack(gradients).mean(0)
            wanted = wanted - LR * momentum
            own = gradients[grid.dp.rank].clone()
            parameters, cost = call(grid, solve, grid.dp, own, parameters.clone(), state, LR, MU)
            require_tensor("sharded_step's result", parameters, [length], torch.float32)
            parameters, kept = parameters.detach(), _kept(state)

            sentence = f"{where} has {{found}} at index {{0}} after step {step + 1}, where one process has {{wanted}}."
            complaints = [
                first_difference(parameters, wanted, sentence),
                unless(
                    kept <= shard,
                    f"over budget: {where} keeps {kept} elements of state, and {shard} are enough. "
                    "Memory counts whole: a view keeps all of what it is a view of.",
                ),
                unless(
                    cost.sent_bytes <= allowed and cost.calls <= 2,
                    f"over budget: {where} sent {cost.sent_bytes} bytes in {cost.calls} collectives per step; "
                    f"{allowed} in 2 are enough.",
                ),
            ]
            yield CaseReport(complaints, f"{kept} of {length}")


def synthetic(length: int, step: int, rank: int) -> torch.Tensor:
    """Return one rank's gradient in one step, [length]: whole numbers, and so is their mean over the ranks."""
    import torch

    places = torch.arange(length)
    return ((places * 5 + step * 3) % 7 + 8 * (rank + 1) + (2 - 4 * (rank % 2)) * (places % 3)).float()


def _kept(state: dict[str, Any]) -> int:
    """Return how many float32 the memory behind the state's tensors could hold, each storage counted once."""
    import torch

    for value in state.values():
        known = isinstance(value, torch.Tensor | int | float)
        require(known, f"state holds {type(value).__name__}; keep tensors and numbers in it.")
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()) // 4


PUZZLE = Puzzle(
    function="sharded_step",
    trial=trial,
    praise=lambda facts: (
        f"the parameters of one process after {STEPS} steps, exactly, on all {RANKS} ranks. "
        f"Elements of momentum kept per rank: {' and '.join(facts[0][::STEPS][:2])}."
    ),
    hints=(
        "Three lines in the middle are ordinary SGD, on a shard. Before them a reduce-scatter makes the shard of the "
        "gradient, after them an all-gather makes parameters of shards. Both want vectors that divide by the ranks.",
        "A shard has size = -(-n // group.size) elements, n divided by the ranks and rounded up. Pad gradient and "
        "parameters with zeros to group.size * size; shard r is [r * size : (r + 1) * size]. A reduce-scatter gives a "
        "sum; you want the mean.",
        "out = gradient.new_empty(size); group.reduce_scatter(padded, out, 'gradients'); out /= group.size. Then "
        "momentum = mu * state.get('momentum', 0) + out, a new tensor of `size` elements; update this rank's shard of "
        "the padded parameters; return group.all_gather(shard, 'parameters')[:n].",
    ),
    goal="Write a step of SGD with momentum in which every rank keeps and updates its own shard.",
    dp=RANKS,
)


# ---- The solution -----------------------------------------------------------------------------------------


def sharded_step(
    group: Group,
    gradient: torch.Tensor,
    parameters: torch.Tensor,
    state: dict[str, Any],
    lr: float,
    mu: float,
) -> torch.Tensor:
    """Return the parameters [n] after a step of SGD with momentum; each rank updates a shard."""
    import torch

    n, size = len(parameters), -(-len(parameters) // group.size)
    padding = parameters.new_zeros(group.size * size - n)
    mean = gradient.new_empty(size)
    group.reduce_scatter(torch.cat([gradient, padding]), mean, "gradients")
    mean /= group.size

    state["momentum"] = mu * state.get("momentum", 0) + mean
    shard = torch.cat([parameters, padding])[group.rank * size :][:size]
    shard = shard - lr * state["momentum"]

    return group.all_gather(shard, "parameters")[:n]
