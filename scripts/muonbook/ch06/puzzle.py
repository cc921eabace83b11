"""Chapter 06's puzzle: write the step of a sharded optimizer, SGD with momentum, on plain flat tensors.

The solution is `sharded_step`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from distmuon.sharding.ledger import ring_bytes
from muonbook.puzzles import Puzzle, bypassed, expect_tensor, first_difference, insist

if TYPE_CHECKING:
    import torch

    from distmuon.launch import World
    from distmuon.sharding.collectives import Group

RANKS, STEPS = 4, 3
LENGTHS = (8, 10, 3)  # shared evenly among 4 ranks, not evenly, and fewer elements than ranks
MU, LR = 0.5, 0.25  # powers of two: every sum and product of the trial is exact


class Seen(NamedTuple):
    """What one rank saw in one step: its parameters and the right ones, what it kept and what it sent."""

    length: int
    step: int
    found: list[float]
    wanted: list[float]
    kept: int
    calls: int
    sent_bytes: int


def trial(world: World, solve: Callable[..., Any]) -> list[Seen]:
    """Take a few steps with every length; the rank's own results and state go into its next step."""
    import torch

    from distmuon.sharding.grid import Grid
    from distmuon.verify.counter import CollectiveCounter

    grid, seen = Grid.of(world), []
    for length in LENGTHS:
        parameters = 100.0 * torch.arange(1, length + 1)
        wanted, momentum = parameters.clone(), torch.zeros(length)
        state: dict[str, Any] = {}
        for step in range(STEPS):
            gradients = [made_up(length, step, rank) for rank in range(world.size)]
            momentum = MU * momentum + torch.stack(gradients).mean(0)
            wanted = wanted - LR * momentum
            grid.ledger.clear()
            with CollectiveCounter() as counter:
                parameters = solve(grid.dp, gradients[world.rank].clone(), parameters.clone(), state, LR, MU)
            insist(bypassed(counter, grid.ledger))
            insist(expect_tensor("sharded_step's result", parameters, [length], torch.float32))
            parameters = parameters.detach()
            total, found = grid.ledger.total(), parameters.nan_to_num(nan=-1e30).tolist()
            seen.append(Seen(length, step + 1, found, wanted.tolist(), _kept(state), total.calls, total.sent_bytes))
    return seen


def made_up(length: int, step: int, rank: int) -> torch.Tensor:
    """Return one rank's gradient in one step, [length]: whole numbers, and so is their mean over the ranks."""
    import torch

    places = torch.arange(length)
    return ((places * 5 + step * 3) % 7 + 8 * (rank + 1) + (2 - 4 * (rank % 2)) * (places % 3)).float()


def _kept(state: dict[str, Any]) -> int:
    """Return how many float32 the memory behind the state's tensors could hold, each storage counted once."""
    import torch

    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    odd = [value for value in state.values() if not isinstance(value, torch.Tensor | int | float)]
    insist(f"state holds {type(odd[0]).__name__}; keep tensors and numbers in it." if odd else "")
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()) // 4


def budget(length: int, ranks: int) -> int:
    """Return the bytes that one reduce-scatter and one all-gather of the padded float32 vector send."""
    padded = 4 * ranks * -(-length // ranks)
    return sum(ring_bytes(op, padded, ranks) for op in ("reduce_scatter", "all_gather"))


def judge(evidence: list[list[Seen]]) -> list[str]:
    """Return what is wrong: parameters first, then what was kept in excess, then what was sent in excess."""
    wrong, large, dear = [], [], []
    for rank, seen in enumerate(evidence):
        for one in seen:
            where = f"with {one.length} elements, rank {rank}"
            if (i := first_difference(one.found, one.wanted)) is not None:
                found, wanted = one.found[i], one.wanted[i]
                what = "a NaN" if found == -1e30 else f"{found:g}"
                wrong.append(
                    f"{where} has {what} at index {i} after step {one.step}, where one process has {wanted:g}."
                )
            enough = -(-one.length // len(evidence))
            if one.kept > enough:
                large.append(
                    f"over budget: {where} keeps {one.kept} elements of state, and {enough} are enough. "
                    "Memory counts whole: a view keeps all of what it is a view of."
                )
            allowed = budget(one.length, len(evidence))
            if one.sent_bytes > allowed or one.calls > 2:
                dear.append(
                    f"over budget: {where} sent {one.sent_bytes} bytes in {one.calls} collectives per step; "
                    f"{allowed} in 2 are enough."
                )
    return [*wrong[:1], *large[:1], *dear[:1]]


def praise(evidence: list[list[Seen]]) -> str:
    """Return what was achieved, with the numbers of the run."""
    kept = " and ".join(f"{one.kept} of {one.length}" for one in evidence[0][:: len(evidence[0]) // len(LENGTHS)][:2])
    return (
        f"the parameters of one process after {STEPS} steps, exactly, on all {len(evidence)} ranks. "
        f"Elements of momentum kept per rank: {kept}."
    )


PUZZLE = Puzzle(
    name="a sharded step",
    function="sharded_step",
    dp=RANKS,
    tp=1,
    trial=trial,
    judge=judge,
    praise=praise,
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
)


# ---- The solution -----------------------------------------------------------------------------------------


def sharded_step(
    group: Group, gradient: torch.Tensor, parameters: torch.Tensor, state: dict[str, Any], lr: float, mu: float
) -> torch.Tensor:
    """Return the parameters [n] after one step of SGD with momentum, of which each rank updates one shard."""
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
