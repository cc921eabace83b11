"""Chapter 1's puzzle: the steepest step for a gradient whose rows are spread over four processes.

No process sees the whole gradient, and a few numbers, added up once, are all that they may tell each other. The
solution is `direction`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from muonbook.puzzles import CaseReport, Puzzle, call, require, require_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from distmuon.sharding.collectives import Group
    from distmuon.sharding.grid import Grid

COLUMNS = 6
CUTS = ((10, 13, 7, 20), (25, 0, 5, 10))  # rows of each process; one may have none
TOLERANCE = 1e-5  # relative: float32 in, float32 out


class AddUp:
    """What the reader's function may call, once: the sum over all processes of what each of them gives."""

    def __init__(self, group: Group) -> None:
        self._group, self.calls = group, 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return, on every process, the sum of all processes' `x`; over budget, stop the trial."""
        import torch

        if not isinstance(x, torch.Tensor):
            require_tensor("what you add up", x, (), torch.float64)
        self.calls += 1
        most = COLUMNS * COLUMNS
        require(self.calls == 1, "over budget: add_up may be called once for each gradient.")
        require(x.numel() <= most, f"over budget: {x.numel()} numbers to add up; {most} are enough.")
        return self._group.all_reduce(x.clone(), "puzzle")


def trial(grid: Grid, direction: Callable[..., Any]) -> Iterator[CaseReport]:
    """Give each process its rows of several gradients; judge what the rows of all processes make together."""
    import torch

    for number, (name, gradient) in enumerate(_gradients()):
        cuts = CUTS[number % len(CUTS)]
        rows = gradient.split(cuts)[grid.world.rank]
        found, _ = call(grid, direction, rows.clone(), AddUp(grid.world))
        require_tensor("direction's result", found, rows.shape, torch.float32)
        x = torch.zeros_like(gradient, dtype=torch.float64)
        x.split(cuts)[grid.world.rank].copy_(found.detach())
        yield CaseReport([_objection(name, gradient.double(), grid.world.all_reduce(x, "the whole X"))])


def _gradients() -> Iterator[tuple[str, Tensor]]:
    import torch

    generator = torch.Generator().manual_seed(1)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator).float()

    rows = sum(CUTS[0])
    yield "an ordinary gradient", integers(rows, COLUMNS)
    yield "a skewed gradient", integers(sum(CUTS[1]), COLUMNS) * 3.0 ** -torch.arange(COLUMNS)
    yield "a gradient with two directions", integers(rows, 2) @ integers(2, COLUMNS)
    yield "a gradient with entries near 1e-30", 1e-30 * integers(sum(CUTS[1]), COLUMNS)
    yield "a gradient of zeros", torch.zeros(rows, COLUMNS)


def _objection(name: str, gradient: Tensor, x: Tensor) -> str:
    """Return whether X is too large (||X||_spec > 1) or, if not, gains less than the most, -<G, X> = ||G||_nuclear."""
    import torch

    if not bool(x.isfinite().all()):
        return f"for {name}, X holds an infinity or a NaN: is something divided by a singular value of 0?"
    stretch = torch.linalg.matrix_norm(x, ord=2).item()
    if stretch > 1 + TOLERANCE:
        return f"for {name}, X stretches some input {stretch:.3f} times; at most 1 is allowed."
    nuclear = torch.linalg.svdvals(gradient).sum().item()
    gain = -(gradient * x).sum().item() / nuclear + 0.0 if nuclear else 1.0
    return (
        "" if gain >= 1 - TOLERANCE else f"for {name}, X gains {gain:.3f} of what is possible; there is a steeper one."
    )


PUZZLE = Puzzle(
    function="direction",
    trial=trial,
    praise=lambda facts: (
        f"the steepest X for all {len(facts[0])} gradients, put together from four processes that added up "
        f"{COLUMNS} x {COLUMNS} numbers."
    ),
    hints=(
        "G = U S V^T. Then G^T G = V S^2 V^T: a small matrix that knows V and S, though nothing of U. "
        "And G^T G is a sum over the rows of G.",
        "`torch.linalg.eigh(gram)` gives the squares of S, and V. Each process then finds its own rows of U from its "
        "own rows of G: U = G V S^-1.",
        "X = -G V S^-1 V^T, with 0 in place of 1/s where s is 0 up to rounding: where s^2 is below 1e-12 of the "
        "largest. Compute in float64: the square of 1e-30 does not fit into float32.",
    ),
    goal="Compute the steepest step for a gradient whose rows are spread over four processes.",
    dp=4,
    told=2,
)


# ---- The solution -----------------------------------------------------------------------------------------


def direction(rows: Tensor, add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Return this process's rows of the X that minimises <G, X> among all with ||X||_spec <= 1.

    rows: [n, 6] float32, this process's rows of G. add_up(x): the sum of all processes' x.
    """
    import torch

    g = rows.double()
    gram = add_up(g.mT @ g)  # G^T G = V S^2 V^T, [6, 6]: a sum over rows, wherever they are
    squares, v = torch.linalg.eigh(gram)
    present = squares > 1e-12 * squares[-1]  # the others are 0 but for rounding
    v, squares = v[:, present], squares[present]
    return (-(g @ v) @ (v / squares.sqrt()).mT).to(rows.dtype)  # -U V^T, our rows: U = G V S^-1
