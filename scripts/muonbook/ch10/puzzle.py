"""Chapter 10's puzzle: the norm of a gradient of which no rank has the whole, and some have the same part.

The solution is `global_norm`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from muonbook.puzzles import CaseReport, Puzzle, call, require, unless

if TYPE_CHECKING:
    import torch

    from distmuon.sharding.grid import Grid

TOLERANCE = 1e-6  # of the norm: float32 would do, and adding in another order
BUDGET = 8  # bytes of payload: one float64


def trial(grid: Grid, global_norm: Callable[..., Any]) -> Iterator[CaseReport]:
    """Cut made-up gradients of a small model as its layout says, and call the reader's function on the pieces."""
    import torch

    from distmuon.sharding.layout import ParamSpec, plan

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
    found, cost = call(grid, global_norm, grid, pieces)
    require(isinstance(found, float), f"global_norm returned a {type(found).__name__}, not a float.")

    where, wanted = f"rank {grid.world.rank}", squares**0.5
    ratio = f"{found**2 / squares:.2f} times the right sum of squares"
    complaints = [
        unless(
            abs(found - wanted) <= TOLERANCE * wanted,
            f"{where} finds a norm of {found:.4f}, and it is {wanted:.4f} ({ratio}).",
        ),
        unless(
            cost.calls <= 1 and cost.payload_bytes <= BUDGET,
            f"over budget: {where} made {cost.calls} collective(s) of {cost.payload_bytes} bytes in all; "
            f"one of {BUDGET} bytes is enough.",
        ),
    ]
    yield CaseReport(complaints, found)


PUZZLE = Puzzle(
    function="global_norm",
    trial=trial,
    praise=lambda facts: f"{facts[0][0]:.4f} on all {len(facts)} ranks, from one all-reduce of one number.",
    hints=(
        "Which ranks hold parts that nobody else holds? Walk along a column of the grid, then along a row.",
        "Along a column, shards never overlap. Along a row they do not either where a parameter is cut over TP; where "
        "it is not, all TP ranks hold the very same piece.",
        "Leave a piece out where tp_split_dim is None and grid.tp.rank is not 0. Then sum over the whole world.",
    ),
    goal="Compute the norm of a gradient of which no rank holds all, and some ranks hold the same part.",
    dp=2,
    tp=2,
)


# ---- The solution -----------------------------------------------------------------------------------------


def global_norm(grid: Grid, pieces: list[tuple[torch.Tensor, int | None]]) -> float:
    """Return the norm of the whole gradient. pieces: (flat part, tp_split_dim)."""
    import torch

    squares = torch.zeros((), dtype=torch.float64, device=grid.device)
    for gradient, tp_split_dim in pieces:
        if tp_split_dim is not None or grid.tp.rank == 0:  # what all hold counts once
            squares += gradient.double().square().sum()
    return grid.world.all_reduce(squares, "squares").sqrt().item()
