"""Chapter 07's puzzle: bring one matrix of a bucket to every rank, without bringing the bucket.

The solution is `fetch`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distmuon.sharding.layout import Range
from distmuon.sharding.ledger import ring_bytes
from muonbook.puzzles import CaseReport, Puzzle, call, first_difference, over_budget, require_tensor

if TYPE_CHECKING:
    import torch

    from distmuon.sharding.collectives import Group
    from distmuon.sharding.grid import Grid

RANKS, SHARD = 4, 13  # elements; every rank owns as many
PLACES = (  # of the matrix in the bucket; on four ranks it lies
    Range(18, 33),  # across a boundary
    Range(28, 36),  # inside one rank's shard
    Range(11, 28),  # across three ranks, and all of the middle one's shard
    Range(5, 14),  # one element beyond a boundary
)


def trial(grid: Grid, fetch: Callable[..., Any]) -> Iterator[CaseReport]:
    """Call the reader's function once for every place; elements hold their own number in the bucket."""
    import torch

    from muonbook.puzzles.equal_pieces import EqualPieces

    bucket = torch.arange(RANKS * SHARD, dtype=torch.float32)
    group = EqualPieces.of(grid.dp)
    for place in PLACES:
        found, cost = call(grid, fetch, group, bucket.view(RANKS, SHARD)[grid.dp.rank].clone(), *place)
        require_tensor("fetch's result", found, [place.size], torch.float32)

        where = f"with the matrix at {place.start}:{place.end}, rank {grid.dp.rank}"
        sentence = f"{where} has {{found}} at index {{0}}, not {{wanted}}."
        wrong = first_difference(found, bucket[place.as_slice], sentence, "element {:g} of the bucket")
        longest = max(Range(SHARD * rank, SHARD * (rank + 1)).intersect(place).size for rank in range(RANKS))
        enough = ring_bytes("all_gather", 4 * RANKS * longest, RANKS)
        sent = f". No rank owns more than {longest} of its elements, so {enough} bytes are enough."
        yield CaseReport([wrong, over_budget(where, cost, enough, calls="", sent=sent)], str(cost.sent_bytes))


PUZZLE = Puzzle(
    function="fetch",
    trial=trial,
    praise=lambda facts: (
        f"every rank holds the whole matrix, wherever it lay. Bytes sent: {', '.join(facts[0])}; "
        f"gathering the bucket: {ring_bytes('all_gather', 4 * RANKS * SHARD, RANKS)}."
    ),
    hints=(
        "Every rank can work out every other rank's piece: shards are equally long, and you know where the matrix "
        "starts and ends. Range.intersect does it. Which piece is the longest?",
        "An all-gather wants equal contributions. Send a tensor as long as the longest piece, with your own piece at "
        "its start and zeros behind it.",
        "After the gather, view the result as [ranks, longest], take from row r as many elements as rank r's piece "
        "has, and join them. Your own piece, counted from your shard's start, is piece.relative_to(rank * len(shard)).",
    ),
    goal="Bring one matrix of a bucket to all ranks without gathering the bucket.",
    dp=RANKS,
)


# ---- The solution -----------------------------------------------------------------------------------------


def fetch(group: Group, shard: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return elements start:end of the gathered bucket on every rank, from one short all-gather."""
    import torch

    size = len(shard)
    shards = [Range(rank * size, (rank + 1) * size) for rank in range(group.size)]
    pieces = [shard_range.intersect(Range(start, end)) for shard_range in shards]
    longest = max(piece.size for piece in pieces)

    local = pieces[group.rank].relative_to(group.rank * size)
    contribution = shard.new_zeros(longest)
    contribution[: local.size] = shard[local.as_slice]

    rows = group.all_gather(contribution, "pieces").view(group.size, longest)
    return torch.cat([row[: piece.size] for row, piece in zip(rows, pieces, strict=True)])
