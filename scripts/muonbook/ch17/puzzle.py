"""Chapter 17's puzzle: bring pieces of unequal length to the owners of their matrices, in one collective.

The solution is `to_owners`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from muonbook.puzzles import CaseReport, Puzzle, require, unless

if TYPE_CHECKING:
    from torch import Tensor

    from distmuon.sharding.grid import Grid

Shape = tuple[int, int]
MODELS: tuple[tuple[str, tuple[Shape, ...], tuple[int, ...]], ...] = (  # name, matrices, the owner of each
    ("rows that divide by three ranks", ((6, 4), (3, 5), (9, 2)), (0, 1, 2)),
    ("7 and 5 rows over three ranks", ((7, 4), (5, 3)), (2, 0)),
    ("2 and 4 rows, so that a rank has none", ((2, 6), (4, 3), (1, 8)), (1, 2, 2)),
    ("one owner of everything", ((7, 3), (8, 2), (1, 1)), (1, 1, 1)),
)


def trial(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Cut matrices as FSDP2 cuts them, hand this rank its pieces, and look at what it makes of its own matrices."""
    import torch

    from distmuon.verify.counter import CollectiveCounter

    dp = grid.dp
    for name, shapes, owners in MODELS:
        numbers = torch.arange(1.0, 1 + sum(a * b for a, b in shapes))
        wholes = [n.view(s) for n, s in zip(numbers.split([a * b for a, b in shapes]), shapes, strict=True)]
        pieces = [_cut(whole, dp.size)[dp.rank].clone() for whole in wholes]
        with CollectiveCounter() as counter:
            found = solve(pieces, list(shapes), list(owners), dp)
        mine = [i for i, owner in enumerate(owners) if owner == dp.rank]
        ours = isinstance(found, Mapping) and sorted(found) == mine
        require(ours, f"for {name}, to_owners returned {_keys(found)}; rank {dp.rank} owns {mine}: a dict of those.")
        wrong = [i for i in mine if not (torch.is_tensor(found[i]) and torch.equal(found[i], wholes[i]))]
        calls = int(counter.ledger.total().calls)
        complaints = [
            unless(not wrong, f"for {name}, {_first(wrong)} of rank {dp.rank} is not the whole one, rows in order."),
            unless(calls <= 1, f"for {name} you made {calls} collectives; one is enough for all matrices."),
        ]
        yield CaseReport(complaints, str(len(mine)))


def _cut(whole: Tensor, ranks: int) -> list[Tensor]:
    cut = list(whole.chunk(ranks))
    return [*cut, *[whole[:0]] * (ranks - len(cut))]


def _first(numbers: Sequence[int]) -> str:
    return f"matrix {numbers[0]}" if numbers else "nothing"


def _keys(found: Any) -> str:
    return f"a dict of {sorted(found)}" if isinstance(found, Mapping) else repr(type(found).__name__)


PUZZLE = Puzzle(
    function="to_owners",
    trial=trial,
    praise=lambda facts: f"{len(MODELS)} models, unequal and empty pieces among them, each in one collective.",
    hints=(
        "How many rows does another rank have of a matrix? You need not ask it: `my_rows` of the five-minute puzzle "
        "tells, and a rank may have none.",
        "For each rank, concatenate your pieces of the matrices that it owns, flat. What comes from rank r are its "
        "pieces of yours, in the same order: the lengths of what comes are sums over your own matrices.",
        "dp.all_to_all_v(parcels, lengths, 'pieces') does one all-to-all. Split what came from each rank into its "
        "pieces, and torch.cat the pieces of one matrix over ranks.",
    ),
    goal="Bring pieces of unequal length to the owners of their matrices in one collective.",
    dp=3,
    tp=1,
)


# ---- The solution -----------------------------------------------------------------------------------------


def to_owners(
    pieces: Sequence[Tensor],  # this rank's rows [A_r, B] of every matrix
    shapes: Sequence[Shape],  # of the whole matrices
    owners: Sequence[int],
    dp: Any,
) -> dict[int, Tensor]:
    """Return {number: whole matrix} of those that this rank owns, from everybody's rows of them."""
    import torch

    ranks = range(dp.size)
    owned_by = [[i for i, owner in enumerate(owners) if owner == rank] for rank in ranks]
    owned = owned_by[dp.rank]

    def rows(matrix: int, rank: int) -> int:
        a, _ = shapes[matrix]
        most = -(-a // dp.size)
        return min((rank + 1) * most, a) - min(rank * most, a)

    sizes = [[rows(i, rank) * shapes[i][1] for i in owned] for rank in ranks]
    nothing = pieces[0].new_empty(0)
    parcels = [torch.cat([nothing, *(pieces[i].flatten() for i in to)]) for to in owned_by]
    received = dp.all_to_all_v(parcels, [sum(lengths) for lengths in sizes], "pieces")
    split = [parcel.split(lengths) for parcel, lengths in zip(received, sizes, strict=True)]
    return {i: torch.cat([s[n] for s in split]).view(shapes[i]) for n, i in enumerate(owned)}
