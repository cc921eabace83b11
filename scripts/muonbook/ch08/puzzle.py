"""Chapter 08's puzzle: make whole every matrix of which a rank owns a piece, in one call that carries only what is cut.

The solution is `gather_cut`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distmuon.sharding.layout import Range
from distmuon.sharding.ledger import ring_bytes
from muonbook.puzzles import CaseReport, Puzzle, call, first_difference, over_budget, require, require_tensor

if TYPE_CHECKING:
    import torch

    from distmuon.sharding.collectives import Group
    from distmuon.sharding.grid import Grid

RANKS, SHARD = 4, 20  # elements per shard
CASES = (  # the matrices of one bucket, which is 80 elements long
    (Range(0, 12), Range(12, 30), Range(30, 36), Range(36, 45), Range(45, 52)),  # ranks 0 to 2; rank 3 has none
    (Range(4, 16), Range(20, 26), Range(26, 40), Range(50, 58)),  # nothing is cut, and rank 3 has none
    (Range(0, 5), Range(5, 66), Range(66, 80)),  # one matrix over all four ranks
    (Range(0, 20), Range(20, 40), Range(40, 47), Range(47, 65), Range(65, 80)),  # only ranks 2 and 3 have something cut
)


def trial(grid: Grid, solve: Callable[..., Any]) -> Iterator[CaseReport]:
    """Call the reader's function once per case; elements hold their own number in the bucket, and NaN elsewhere."""
    import torch

    from muonbook.puzzles.equal_pieces import EqualPieces

    group, rank = EqualPieces.of(grid.dp), grid.dp.rank
    for number, matrices in enumerate(CASES, start=1):
        bucket = torch.full((RANKS * SHARD,), torch.nan)
        for place in matrices:
            bucket[place.as_slice] = torch.arange(*place, dtype=torch.float32)
        found, cost = call(grid, solve, group, bucket.view(RANKS, SHARD)[rank].clone(), list(matrices))
        require(isinstance(found, dict), f"gather_cut returned {type(found).__name__}, and a dict is wanted.")
        for index, matrix in found.items():
            require(index in range(len(matrices)), f"gather_cut returned {index!r}, which numbers no matrix.")
            require_tensor(f"matrix {index}", matrix, [matrices[index].size], torch.float32)

        where, wrong, needless = f"in case {number}, rank {rank}", "", ""
        mine = Range(rank * SHARD, (rank + 1) * SHARD)
        for index, place in enumerate(matrices):
            owned = place.intersect(mine).size > 0
            if owned and index not in found:
                wrong = wrong or f"{where} owns a piece of matrix {index} and did not return it."
            elif owned:
                sentence = f"{where} has {{found}} in matrix {index}, where element {{wanted}} belongs."
                element = "element {:g} of the bucket"
                wrong = wrong or first_difference(found[index], bucket[place.as_slice], sentence, element)
            elif index in found:
                needless = needless or f"{where} returned matrix {index}, of which it owns nothing: work for others."
        longest = max(sum(piece.size for _, piece in cut_pieces(matrices, each, SHARD)) for each in range(RANKS))
        enough = ring_bytes("all_gather", 4 * RANKS * longest, RANKS)
        sent = f", and {enough} are enough. What a rank owns whole, no other rank needs."
        over = over_budget(where, cost, enough, calls=" for all matrices", sent=sent)
        yield CaseReport([wrong, needless, over], str(cost.sent_bytes))


PUZZLE = Puzzle(
    function="gather_cut",
    trial=trial,
    praise=lambda facts: (
        f"whole matrices on all their owners, one call at most. Bytes sent: {', '.join(facts[0])}; "
        f"gather_all: {ring_bytes('all_gather', 4 * RANKS * SHARD, RANKS)} each time."
    ),
    hints=(
        "Chapter 7's puzzle fetched one matrix. Put the pieces of all cut matrices into one message: a rank has two at "
        "most, one at each end of its shard. A matrix that lies inside one shard is not sent.",
        "Write a function of a rank's number that lists that rank's cut pieces, in order. Every rank calls it for all "
        "ranks: it then knows how long every message is, how long the longest, and what stands where in each.",
        "All ranks join the call, also those with an empty message; where the longest message is empty, all skip it. "
        "Afterwards walk through rank 0's message, then rank 1's, and append each piece to its matrix: ranks stand in "
        "the order of the bucket, so the pieces arrive in order too. Keep the matrices that you own a piece of.",
    ),
    goal="Complete the matrices of which a rank owns a piece, in one call that carries only what is cut.",
    dp=RANKS,
)


# ---- The solution -----------------------------------------------------------------------------------------


def cut_pieces(matrices: Sequence[Range], rank: int, size: int) -> list[tuple[int, Range]]:
    """Return (matrix, piece) for every piece that this rank owns of a matrix that is cut."""
    shard = Range(rank * size, (rank + 1) * size)
    pieces = [(i, place.intersect(shard)) for i, place in enumerate(matrices)]
    return [(i, piece) for i, piece in pieces if 0 < piece.size < matrices[i].size]


def gather_cut(
    group: Group, shard: torch.Tensor, matrices: Sequence[Range]
) -> dict[int, torch.Tensor]:  # fmt: skip
    """Return {number: elements} of every matrix of which this rank owns a piece."""
    import torch

    size, origin = len(shard), group.rank * len(shard)
    local = Range(origin, origin + size)
    lists = [cut_pieces(matrices, rank, size) for rank in range(group.size)]
    longest = max(sum(piece.size for _, piece in pieces) for pieces in lists)

    joined: dict[int, list[torch.Tensor]] = {}
    if longest:  # every rank sees the same lists: all join the call, or none does
        own = [shard[piece.relative_to(origin).as_slice] for _, piece in lists[group.rank]]
        message = torch.cat([*own, shard.new_zeros(longest - sum(map(len, own)))])
        rows = group.all_gather(message, "cut pieces").view(group.size, longest)
        for row, pieces in zip(rows, lists, strict=True):
            start = 0
            for index, piece in pieces:
                joined.setdefault(index, []).append(row[start : start + piece.size])
                start += piece.size

    whole = {}
    for index, place in enumerate(matrices):
        if place.intersect(local) == place:
            whole[index] = shard[place.relative_to(origin).as_slice]
        elif place.intersect(local).size:
            whole[index] = torch.cat(joined[index])
    return whole
