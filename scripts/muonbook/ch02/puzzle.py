"""Chapter 2's puzzle: the same five quintics of a wide matrix, for fewer floating-point operations.

Two processes try it, each with matrices of its own shapes, while torch counts. The solution is `orthogonalize`, at the
end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from muonbook.puzzles import CaseReport, Puzzle, each_operator, require, require_tensor, unless

if TYPE_CHECKING:
    from torch import Tensor

    from distmuon.sharding.grid import Grid

SHAPES = (((48, 192), (32, 256)), ((40, 160), (24, 192)))  # of each process: 4 and 8 times as wide as high
SHARE = 2 / 3  # of the standard form's operations
TOLERANCE = 1e-9  # of any element, which are below 1: rounding in float64 leaves 1e-15
UNCOUNTED = ("linalg", "svd", "eig", "qr", "cholesky", "lu_", "solve", "inverse", "mv", "dot")  # parts of names


def trial(grid: Grid, orthogonalize: Callable[..., Any]) -> Iterator[CaseReport]:
    """Give each process two unit matrices and their quintics; count what the reader's function multiplies."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from distmuon.optim.coefficients import quintics
    from distmuon.optim.newton_schulz import flops, newton_schulz

    for x, name in _matrices(grid.world.rank):
        coefficients = quintics(name, 5)
        with _only_counted(x.numel()), FlopCounterMode(display=False) as counter:
            found = orthogonalize(x.clone(), coefficients)
        require_tensor("orthogonalize's result", found, x.shape, torch.float64)
        error = (found.detach() - newton_schulz(x, coefficients=coefficients)).abs().max().item()
        operations, standard = counter.get_total_flops(), flops(x.shape)

        shape = f"{x.shape[0]} x {x.shape[1]}"
        where, budget = f"rank {grid.world.rank}'s matrix of {shape}", int(SHARE * standard)
        off = f"is off by {error:.1g}" if error == error else "has NaN in it"
        complaints = [
            unless(error <= TOLERANCE, f"the result for {where} {off}; at most {TOLERANCE:g} is allowed."),
            unless(operations <= budget, f"{where} took {operations:,} operations, over the budget of {budget:,}."),
        ]
        yield CaseReport(complaints, f"{operations / standard:.0%} for {shape}")


def _matrices(rank: int) -> Iterator[tuple[Tensor, str]]:
    """Yield this process's matrices, Frobenius norm 1, float64, and which quintics are wanted."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    (a, b), (c, d) = SHAPES[rank]
    gaussian = torch.randn(a, b, generator=generator, dtype=torch.float64)
    yield gaussian / torch.linalg.matrix_norm(gaussian), "muon"
    skewed = torch.randn(c, d, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, c).double()[:, None]
    yield skewed / torch.linalg.matrix_norm(skewed), "polar_express"


def _only_counted(largest: int) -> Any:
    """Return a context in which the products that the counter cannot see stop the trial."""

    def look(_: str, operator: str, result: Any) -> None:
        hidden = "norm" not in operator and any(part in operator for part in UNCOUNTED)
        require(not hidden, f"torch.{operator.strip('_')} is work that the counter does not see; use matrix products.")
        size = result.numel() if hasattr(result, "numel") else 0
        require(size <= largest, f"a tensor of {size:,} elements, more than the matrix has; make products with @.")

    return each_operator(look)


PUZZLE = Puzzle(
    function="orthogonalize",
    trial=trial,
    praise=lambda facts: (
        f"the same result for a part of the standard form's operations: {', '.join(chain.from_iterable(facts))}."
    ),
    hints=(
        "Only a product that involves X costs 2 a^2 b, and b is the long side. How few of those are needed?",
        "Every iteration multiplies X from the left by a small square matrix, P = a I + b R + c R^2 with R = X X^T. "
        "Collect these in Q, and multiply X by Q once, at the end. What is R after the step?",
        "X <- P X makes R <- P R P, as P is symmetric. So: R = X X^T once; in each step P from R, then Q <- P Q and "
        "R <- P R P; at the end Q X. The first Q is P itself, and the last R is never used.",
    ),
    goal="Compute five iterations of Newton–Schulz on a wide matrix with a third fewer operations.",
    dp=2,
    told=2,
)


# ---- The solution -----------------------------------------------------------------------------------------


def orthogonalize(x: Tensor, quintics: Sequence[tuple[float, float, float]]) -> Tensor:
    """Return what all quintics (a, b, c), in order, make of x: [A, B], A < B."""
    import torch

    identity = torch.eye(len(x), dtype=x.dtype)
    q, gram = identity, x @ x.mT  # X_k = Q_k X_0, and gram is X_k X_k^T
    for step, (a, b, c) in enumerate(quintics):
        p = a * identity + b * gram + c * (gram @ gram)
        q = p @ q if step else p
        if step + 1 < len(quintics):
            gram = p @ gram @ p
    return q @ x
