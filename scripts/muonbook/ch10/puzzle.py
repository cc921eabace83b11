"""Chapter 10's puzzle: the norm of a gradient of which no rank has the whole, and some have the same part.

The solution is `global_norm`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from muonbook.puzzles import Puzzle, bypassed, insist

if TYPE_CHECKING:
    import torch

    from distmuon.launch import World
    from distmuon.sharding.grid import Grid

TOLERANCE = 1e-6  # of the norm: float32 would do, and adding in another order
BUDGET = 8  # bytes of payload: one float64


class Seen(NamedTuple):
    """What one rank answered, and what its answer took."""

    found: float
    calls: int
    payload_bytes: int
    wanted: float


def trial(world: World, global_norm: Callable[..., Any]) -> Seen:
    """Cut made-up gradients of a small model as its layout says, and call the reader's function on the pieces."""
    import torch

    from distmuon.sharding.grid import Grid
    from distmuon.sharding.layout import ParamSpec, plan
    from distmuon.verify.counter import CollectiveCounter

    grid = Grid.of(world)
    model = [
        ParamSpec("up.weight", (6, 10), "float32", 0),
        ParamSpec("up.bias", (6,), "float32", 0),
        ParamSpec("down.weight", (5, 6), "float32", 1),
        ParamSpec("down.bias", (5,), "float32", None),  # every TP rank holds the whole of these two
        ParamSpec("norm.weight", (9,), "float32", None),
    ]
    layout = plan(model, grid.dp.size, bucket_size=70)
    generator = torch.Generator().manual_seed(10)
    pieces, squares = [], 0.0
    for spec, meta in zip(model, layout.view(grid.dp.rank), strict=True):
        whole = torch.randint(-9, 10, spec.full_shape(grid.tp.size), generator=generator).float()
        squares += float(whole.double().square().sum())
        local = whole if spec.tp_split_dim is None else whole.chunk(grid.tp.size, spec.tp_split_dim)[grid.tp.rank]
        if meta.owned:
            pieces.append((local.reshape(-1)[meta.range_in_param.as_slice].clone(), spec.tp_split_dim))
    grid.ledger.clear()
    with CollectiveCounter() as counter:
        found = global_norm(grid, pieces)
    wrong_type = "" if isinstance(found, float) else f"global_norm returned a {type(found).__name__}, not a float."
    insist(bypassed(counter, grid.ledger), wrong_type)
    total = grid.ledger.total()
    return Seen(found, total.calls, total.payload_bytes, squares**0.5)


def judge(evidence: list[Seen]) -> list[str]:
    """Return what is wrong: the norm first, then the budget."""
    wrong, dear = [], []
    for rank, seen in enumerate(evidence):
        if not abs(seen.found - seen.wanted) <= TOLERANCE * seen.wanted:
            ratio = f"{(seen.found / seen.wanted) ** 2:.2f} times the right sum of squares"
            wrong.append(f"rank {rank} finds a norm of {seen.found:.4f}, and it is {seen.wanted:.4f} ({ratio}).")
        if seen.calls > 1 or seen.payload_bytes > BUDGET:
            dear.append(
                f"over budget: rank {rank} made {seen.calls} collective(s) of {seen.payload_bytes} bytes in all; "
                f"one of {BUDGET} bytes is enough."
            )
    return [*wrong[:1], *dear[:1]]


def praise(evidence: list[Seen]) -> str:
    """Return what was achieved, with the numbers of the run."""
    return f"{evidence[0].found:.4f} on all {len(evidence)} ranks, from one all-reduce of one number."


PUZZLE = Puzzle(
    name="the norm of the whole gradient",
    function="global_norm",
    dp=4,
    tp=2,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "Which ranks hold parts that nobody else holds? Walk along a column of the grid, then along a row.",
        "Along a column, shards never overlap. Along a row they do not either where a parameter is cut over TP; where "
        "it is not, all TP ranks hold the very same piece.",
        "Leave a piece out where tp_split_dim is None and grid.tp.rank is not 0. Then sum over the whole world.",
    ),
)


# ---- The solution -----------------------------------------------------------------------------------------


def global_norm(grid: Grid, pieces: list[tuple[torch.Tensor, int | None]]) -> float:
    """Return the norm of the whole gradient. pieces: this rank's flat parts, and how each is cut over TP."""
    import torch

    squares = torch.zeros((), dtype=torch.float64, device=grid.device)
    for gradient, tp_split_dim in pieces:
        if tp_split_dim is not None or grid.tp.rank == 0:  # what all TP ranks hold alike counts once
            squares += gradient.double().square().sum()
    return grid.world.all_reduce(squares, "squares").sqrt().item()
