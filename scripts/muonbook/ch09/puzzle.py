"""Chapter 09's puzzle: the Gram matrix and the norm of a matrix whose columns are cut over TP, without gathering it.

The solution is `gram`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from distmuon.sharding.ledger import ring_bytes
from muonbook.puzzles import Puzzle, bypassed, expect_tensor, insist

if TYPE_CHECKING:
    import torch

    from distmuon.launch import World
    from distmuon.sharding.collectives import Group

RANKS = 4
SHAPES = ((4, 24), (3, 32), (6, 8))  # of the whole matrix: wide, wider, and hardly wide


class Seen(NamedTuple):
    """What one rank saw with one matrix: its Gram matrix and norm, the right ones, and what it asked for."""

    found: list[list[int]]
    norm: float
    wanted: list[list[int]]
    calls: int
    sent_bytes: int


def trial(world: World, gram: Callable[..., Any]) -> list[Seen]:
    """Call the reader's function with blocks of whole numbers, of which every sum is exact in any order."""
    import torch

    from distmuon.sharding.grid import Grid
    from distmuon.verify.counter import CollectiveCounter

    grid, seen = Grid.of(world), []
    random = torch.Generator().manual_seed(9)
    for shape in SHAPES:
        whole = torch.randint(-4, 5, shape, generator=random).float()
        block = whole.chunk(grid.tp.size, 1)[grid.tp.rank].contiguous()
        grid.ledger.clear()
        with CollectiveCounter() as counter:
            found = gram(grid.tp, block)
        insist(bypassed(counter, grid.ledger))
        pair = isinstance(found, tuple) and len(found) == 2
        insist(
            "" if pair else f"gram returned {type(found).__name__}, and a pair is wanted: the Gram matrix, the norm."
        )
        insist(expect_tensor("the Gram matrix", found[0], [shape[0], shape[0]], torch.float32))
        norm = found[1].item() if isinstance(found[1], torch.Tensor) and found[1].numel() == 1 else found[1]
        insist("" if isinstance(norm, int | float) else f"the norm is a {type(norm).__name__}, and a number is wanted.")
        entries = found[0].detach().nan_to_num(nan=-9999.0).long().tolist()
        total = grid.ledger.total()
        seen.append(Seen(entries, float(norm), (whole @ whole.T).long().tolist(), total.calls, total.sent_bytes))
    return seen


def judge(evidence: list[list[Seen]]) -> list[str]:
    """Return what is wrong: entries first, then norms, then calls and bytes."""
    wrong, lengths, dear = [], [], []
    for rank, seen in enumerate(evidence):
        for (a, b), one in zip(SHAPES, seen, strict=True):
            where = f"with a matrix of {a} x {b}, rank {rank}"
            places = [(i, j) for i in range(a) for j in range(a) if one.found[i][j] != one.wanted[i][j]]
            if places:
                i, j = places[0]
                wrong.append(
                    f"{where} has {one.found[i][j]} at [{i}, {j}], where row {i} times row {j} is {one.wanted[i][j]}."
                )
            norm = sum(one.wanted[i][i] for i in range(a)) ** 0.5
            if not abs(one.norm - norm) <= 1e-5 * norm:
                lengths.append(f"{where} has norm {one.norm:.2f}, where it is {norm:.2f}.")
            enough = ring_bytes("all_reduce", 4 * a * a, RANKS)
            if one.calls > 1:
                dear.append(f"over budget: {where} made {one.calls} collectives, and one is enough for both answers.")
            elif one.sent_bytes > enough:
                dear.append(
                    f"over budget: {where} sent {one.sent_bytes} bytes, and {enough} are enough. "
                    "The answer is small; must the matrix travel?"
                )
    return [*wrong[:1], *lengths[:1], *dear[:1]]


def praise(evidence: list[list[Seen]]) -> str:
    """Return what was achieved, with the numbers of the run."""
    parts = []
    for (a, b), one in zip(SHAPES, evidence[0], strict=True):
        parts.append(f"{one.sent_bytes} for {a} x {b} (a gather: {ring_bytes('all_gather', 4 * a * b, RANKS)})")
    return f"exact on all {RANKS} ranks, in one call. Bytes sent by each: {', '.join(parts)}."


PUZZLE = Puzzle(
    name="a Gram matrix without the matrix",
    function="gram",
    dp=1,
    tp=RANKS,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "Write X as [X0 | X1 | X2 | X3]. Entry (i, j) of the Gram matrix is a sum over all columns. Which part of that "
        "sum can a rank compute alone?",
        "X X^T = X0 X0^T + X1 X1^T + X2 X2^T + X3 X3^T. Each term is a x a, whatever the width of a block.",
        "All-reduce the local product: group.all_reduce(block @ block.T, 'gram'). And the squared norm of X is the sum "
        "of the squared norms of its rows, which stand on the diagonal of what you have just received.",
    ),
)


# ---- The solution -----------------------------------------------------------------------------------------


def gram(group: Group, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return X X^T [a, a] and the Frobenius norm of X [a, b], of which every rank holds columns `block` [a, b / T]."""
    whole = group.all_reduce(block @ block.T, "gram")
    return whole, whole.trace().sqrt()
