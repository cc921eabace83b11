"""Chapter 08's puzzle: make whole every matrix of which a rank owns a piece, in one call that carries only what is cut.

The solution is `gather_cut`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distmuon.sharding.layout import Range
from distmuon.sharding.ledger import ring_bytes
from muonbook.puzzles import Puzzle, bypassed, expect_tensor, insist

if TYPE_CHECKING:
    import torch

    from distmuon.launch import World
    from distmuon.sharding.collectives import Group

RANKS, SHARD = 4, 20  # elements per shard
CASES = (  # the matrices of one bucket, which is 80 elements long
    (Range(0, 12), Range(12, 30), Range(30, 36), Range(36, 45), Range(45, 52)),  # ranks 0 to 2; rank 3 has none
    (Range(4, 16), Range(20, 26), Range(26, 40), Range(50, 58)),  # nothing is cut, and rank 3 has none
    (Range(0, 5), Range(5, 66), Range(66, 80)),  # one matrix over all four ranks
    (Range(0, 20), Range(20, 40), Range(40, 47), Range(47, 65), Range(65, 80)),  # only ranks 2 and 3 have something cut
)


class Seen(NamedTuple):
    """What one rank saw in one case: the matrices that its function returned, and what it sent."""

    found: dict[int, list[int]]
    calls: int
    sent_bytes: int


def trial(world: World, solve: Callable[..., Any]) -> list[Seen]:
    """Call the reader's function once per case; elements hold their own number in the bucket, and NaN elsewhere."""
    import torch

    from distmuon.sharding.grid import Grid
    from distmuon.verify.counter import CollectiveCounter

    grid, seen = Grid.of(world), []
    for matrices in CASES:
        grid.ledger.clear()
        bucket = torch.full((RANKS * SHARD,), torch.nan)
        for place in matrices:
            bucket[place.as_slice] = torch.arange(*place, dtype=torch.float32)
        shard = bucket.view(RANKS, SHARD)[grid.dp.rank].clone()
        with CollectiveCounter() as counter:
            found = solve(grid.dp, shard, list(matrices))
        insist(bypassed(counter, grid.ledger))
        insist("" if isinstance(found, dict) else f"gather_cut returned {type(found).__name__}, and a dict is wanted.")
        for index, matrix in found.items():
            insist("" if index in range(len(matrices)) else f"gather_cut returned {index!r}, which numbers no matrix.")
            insist(expect_tensor(f"matrix {index}", matrix, [matrices[index].size], torch.float32))
        whole = {index: matrix.nan_to_num(nan=-1.0).long().tolist() for index, matrix in found.items()}
        total = grid.ledger.total()
        seen.append(Seen(whole, total.calls, total.sent_bytes))
    return seen


def owned(matrices: Sequence[Range], rank: int) -> list[int]:
    """Return which matrices this rank owns a piece of."""
    shard = Range(rank * SHARD, (rank + 1) * SHARD)
    return [index for index, place in enumerate(matrices) if place.intersect(shard).size]


def longest_message(matrices: Sequence[Range]) -> int:
    """Return how many elements of cut matrices the rank has that has most of them."""
    return max(sum(piece.size for _, piece in cut_pieces(matrices, rank, SHARD)) for rank in range(RANKS))


def judge(evidence: list[list[Seen]]) -> list[str]:
    """Return what is wrong: missing and wrong matrices first, then those that are of no use, then calls and bytes."""
    wrong, needless, dear = [], [], []
    for rank, seen in enumerate(evidence):
        for number, (matrices, one) in enumerate(zip(CASES, seen, strict=True), start=1):
            where, mine = f"in case {number}, rank {rank}", owned(matrices, rank)
            for index in mine:
                place = matrices[index]
                if index not in one.found:
                    wrong.append(f"{where} owns a piece of matrix {index} and did not return it.")
                elif one.found[index] != list(range(*place)):
                    found = next(pair for pair in zip(range(*place), one.found[index], strict=True) if len({*pair}) > 1)
                    had = "a NaN" if found[1] < 0 else f"element {found[1]} of the bucket"
                    wrong.append(f"{where} has {had} in matrix {index}, where element {found[0]} belongs.")
            for index in sorted(set(one.found) - set(mine)):
                needless.append(f"{where} returned matrix {index}, of which it owns nothing: work for others.")
            enough = ring_bytes("all_gather", 4 * RANKS * longest_message(matrices), RANKS)
            if one.calls > 1:
                dear.append(f"over budget: {where} made {one.calls} collectives, and one is enough for all matrices.")
            elif one.sent_bytes > enough:
                dear.append(
                    f"over budget: {where} sent {one.sent_bytes} bytes, and {enough} are enough. "
                    "What a rank owns whole, nobody else needs."
                )
    return [*wrong[:1], *needless[:1], *dear[:1]]


def praise(evidence: list[list[Seen]]) -> str:
    """Return what was achieved, with the numbers of the run."""
    bucket = ring_bytes("all_gather", 4 * RANKS * SHARD, RANKS)
    sent = ", ".join(str(one.sent_bytes) for one in evidence[0])
    return f"whole matrices on all their owners, one call at most. Bytes sent: {sent}; gather_all: {bucket} each time."


PUZZLE = Puzzle(
    name="gather only what is cut",
    function="gather_cut",
    dp=RANKS,
    tp=1,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "Chapter 7's puzzle fetched one matrix. Put the pieces of all cut matrices into one message: a rank has two at "
        "most, one at each end of its shard. A matrix that lies inside one shard travels nowhere.",
        "Write a function of a rank's number that lists that rank's cut pieces, in order. Every rank calls it for all "
        "ranks: it then knows how long every message is, how long the longest, and what stands where in each.",
        "All ranks join the call, also those with an empty message; where the longest message is empty, all skip it. "
        "Afterwards walk through rank 0's message, then rank 1's, and append each piece to its matrix: ranks stand in "
        "the order of the bucket, so the pieces arrive in order too. Keep the matrices that you own a piece of.",
    ),
)


# ---- The solution -----------------------------------------------------------------------------------------


def cut_pieces(matrices: Sequence[Range], rank: int, size: int) -> list[tuple[int, Range]]:
    """Return (matrix, piece) for every piece that this rank owns of a matrix that it does not own whole."""
    pieces = [(i, place.intersect(Range(rank * size, (rank + 1) * size))) for i, place in enumerate(matrices)]
    return [(i, piece) for i, piece in pieces if 0 < piece.size < matrices[i].size]


def gather_cut(group: Group, shard: torch.Tensor, matrices: Sequence[Range]) -> dict[int, torch.Tensor]:
    """Return {number: elements} of every matrix of which this rank owns a piece, from one all-gather of cut pieces."""
    import torch

    size, origin = len(shard), group.rank * len(shard)
    mine = Range(origin, origin + size)
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
        if place.intersect(mine) == place:
            whole[index] = shard[place.relative_to(origin).as_slice]
        elif place.intersect(mine).size:
            whole[index] = torch.cat(joined[index])
    return whole
