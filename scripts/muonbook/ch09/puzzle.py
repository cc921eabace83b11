"""Chapter 09's puzzle: the Gram matrix and the norm of a matrix whose columns are cut over TP, without gathering it.

The solution is `gram`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distmuon.sharding.ledger import ring_bytes
from muonbook.puzzles import CaseReport, Puzzle, call, first_difference, over_budget, require, require_tensor, unless

if TYPE_CHECKING:
    import torch

    from distmuon.sharding.collectives import Group
    from distmuon.sharding.grid import Grid

RANKS = 4
SHAPES = ((4, 24), (3, 32), (6, 8))  # of the whole matrix: wide, wider, and hardly wide


def trial(grid: Grid, gram: Callable[..., Any]) -> Iterator[CaseReport]:
    """Call the reader's function with blocks of whole numbers, of which every sum is exact in any order."""
    import torch

    random = torch.Generator().manual_seed(9)
    for a, b in SHAPES:
        whole = torch.randint(-4, 5, (a, b), generator=random).float()
        found, cost = call(grid, gram, grid.tp, whole.chunk(RANKS, 1)[grid.tp.rank].contiguous())
        pair = isinstance(found, tuple) and len(found) == 2
        require(pair, f"gram returned {type(found).__name__}, and a pair is wanted: the Gram matrix, the norm.")
        product, norm = found
        require_tensor("the Gram matrix", product, [a, a], torch.float32)
        norm = norm.item() if isinstance(norm, torch.Tensor) and norm.numel() == 1 else norm
        require(isinstance(norm, int | float), f"the norm is a {type(norm).__name__}, and a number is wanted.")

        where, right = f"with a matrix of {a} x {b}, rank {grid.tp.rank}", whole.norm().item()
        sentence = f"{where} has {{found}} at [{{0}}, {{1}}], where row {{0}} times row {{1}} is {{wanted}}."
        enough = ring_bytes("all_reduce", 4 * a * a, RANKS)
        sent = f", and {enough} are enough. The answer is small; must the matrix travel?"
        complaints = [
            first_difference(product, whole @ whole.T, sentence),
            unless(abs(norm - right) <= 1e-5 * right, f"{where} has norm {norm:.2f}, where it is {right:.2f}."),
            over_budget(where, cost, enough, calls=" for both answers", sent=sent),
        ]
        gather = ring_bytes("all_gather", 4 * a * b, RANKS)
        yield CaseReport(complaints, f"{cost.sent_bytes} for {a} x {b} (a gather: {gather})")


PUZZLE = Puzzle(
    function="gram",
    trial=trial,
    praise=lambda facts: f"exact on all {RANKS} ranks, in one call. Bytes sent by each: {', '.join(facts[0])}.",
    hints=(
        "Write X as [X0 | X1 | X2 | X3]. Entry (i, j) of the Gram matrix is a sum over all columns. Which part of that "
        "sum can a rank compute alone?",
        "X X^T = X0 X0^T + X1 X1^T + X2 X2^T + X3 X3^T. Each term is a x a, whatever the width of a block.",
        "All-reduce the local product: group.all_reduce(block @ block.T, 'gram'). And the squared norm of X is the sum "
        "of the squared norms of its rows, which stand on the diagonal of what you have just received.",
    ),
    goal="Compute the Gram matrix and the norm of a matrix whose columns are cut over ranks.",
    tp=RANKS,
)


# ---- The solution -----------------------------------------------------------------------------------------


def gram(group: Group, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return X X^T [a, a] and the norm of X [a, b], cut into one `block` [a, b / T] per rank."""
    whole = group.all_reduce(block @ block.T, "gram")
    return whole, whole.trace().sqrt()
