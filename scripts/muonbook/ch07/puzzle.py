"""Chapter 07's puzzle: bring one matrix of a bucket to every rank, without bringing the bucket.

The solution is `fetch`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from distmuon.sharding.layout import Range
from distmuon.sharding.ledger import ring_bytes
from muonbook.puzzles import Puzzle, bypassed, expect_tensor, first_difference, insist

if TYPE_CHECKING:
    import torch

    from distmuon.launch import World
    from distmuon.sharding.collectives import Group

SHARD = 13  # elements; every rank owns as many
PLACES = (  # of the matrix in the bucket; on four ranks it lies
    Range(18, 33),  # across a boundary
    Range(28, 36),  # inside one rank's shard
    Range(11, 28),  # across three ranks, and all of the middle one's shard
    Range(5, 14),  # one element beyond a boundary
)


class Seen(NamedTuple):
    """What one rank saw with the matrix in one place."""

    place: Range
    found: list[int]
    sent_bytes: int
    calls: int


def trial(world: World, fetch: Callable[..., Any]) -> list[Seen]:
    """Call the reader's function once for every place; elements hold their own number in the bucket."""
    import torch

    from distmuon.sharding.grid import Grid
    from distmuon.verify.counter import CollectiveCounter

    grid, seen = Grid.of(world), []
    start = SHARD * grid.dp.rank
    for place in PLACES:
        grid.ledger.clear()
        shard = torch.arange(start, start + SHARD, dtype=torch.float32)
        with CollectiveCounter() as counter:
            found = fetch(grid.dp, shard, place.start, place.end)
        insist(bypassed(counter, grid.ledger), expect_tensor("fetch's result", found, [place.size], torch.float32))
        total = grid.ledger.total()
        seen.append(Seen(place, found.nan_to_num(nan=-1.0).long().tolist(), total.sent_bytes, total.calls))
    return seen


def longest_piece(place: Range, ranks: int) -> int:
    """Return how many elements of the matrix the rank has that owns most of it."""
    return max(Range(SHARD * rank, SHARD * (rank + 1)).intersect(place).size for rank in range(ranks))


def judge(evidence: list[list[Seen]]) -> list[str]:
    """Return what is wrong: elements first, then calls, then bytes."""
    wrong, dear = [], []
    for rank, seen in enumerate(evidence):
        for one in seen:
            where = f"with the matrix at {one.place.start}:{one.place.end}, rank {rank}"
            wanted = list(range(one.place.start, one.place.end))
            if (i := first_difference(one.found, wanted)) is not None:
                wrong.append(f"{where} has element {one.found[i]} of the bucket at index {i}, not {wanted[i]}.")
            longest = longest_piece(one.place, len(evidence))
            enough = ring_bytes("all_gather", 4 * len(evidence) * longest, len(evidence))
            if one.calls > 1:
                dear.append(f"over budget: {where} made {one.calls} collectives, and one is enough.")
            elif one.sent_bytes > enough:
                dear.append(
                    f"over budget: {where} sent {one.sent_bytes} bytes. No rank owns more than {longest} of its "
                    f"elements, so {enough} bytes are enough."
                )
    return [*wrong[:1], *dear[:1]]


def praise(evidence: list[list[Seen]]) -> str:
    """Return what was achieved, with the numbers of the run."""
    bucket = ring_bytes("all_gather", 4 * len(evidence) * SHARD, len(evidence))
    sent = ", ".join(str(one.sent_bytes) for one in evidence[0])
    return f"every rank holds the whole matrix, wherever it lay. Bytes sent: {sent}; gathering the bucket: {bucket}."


PUZZLE = Puzzle(
    name="fetch one matrix",
    function="fetch",
    dp=4,
    tp=1,
    trial=trial,
    judge=judge,
    praise=praise,
    hints=(
        "Every rank can work out every other rank's piece: shards are equally long, and you know where the matrix "
        "starts and ends. Range.intersect does it. Which piece is the longest?",
        "An all-gather wants equal contributions. Send a tensor as long as the longest piece, with your own piece at "
        "its start and zeros behind it.",
        "After the gather, view the result as [ranks, longest], take from row r as many elements as rank r's piece "
        "has, and join them. Your own piece, counted from your shard's start, is piece.relative_to(rank * len(shard)).",
    ),
)


# ---- The solution -----------------------------------------------------------------------------------------


def fetch(group: Group, shard: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return elements start:end of the gathered bucket on every rank: [end - start], from one short all-gather."""
    import torch

    size = len(shard)
    pieces = [Range(rank * size, (rank + 1) * size).intersect(Range(start, end)) for rank in range(group.size)]
    longest = max(piece.size for piece in pieces)

    mine = pieces[group.rank].relative_to(group.rank * size)
    contribution = shard.new_zeros(longest)
    contribution[: mine.size] = shard[mine.as_slice]

    rows = group.all_gather(contribution, "pieces").view(group.size, longest)
    return torch.cat([row[: piece.size] for row, piece in zip(rows, pieces, strict=True)])
