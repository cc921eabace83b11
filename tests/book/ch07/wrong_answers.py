"""Wrong answers to the puzzle of chapter 7: above each stands what its reader must be told."""

from distmuon.sharding.layout import Range


def pieces_of(group, shard, start, end):
    """Return the range of the matrix in every rank's shard, counted from the bucket's start."""
    size = len(shard)
    return [Range(rank * size, (rank + 1) * size).intersect(Range(start, end)) for rank in range(group.size)]


def own_piece(group, shard, start, end):
    return shard[pieces_of(group, shard, start, end)[group.rank].relative_to(group.rank * len(shard)).as_slice]


# expect: over budget: with the matrix at 18:33, rank 0 made 2 collectives
def gathers_in_two_halves(group, shard, start, end):
    half, own = -(-len(shard) // 2), own_piece(group, shard, start, end)
    padded = shard.new_zeros(2 * half)
    padded[: len(own)] = own
    halves = [group.all_gather(part.clone(), "half").view(group.size, half) for part in padded.split(half)]
    found = []
    for rank, piece in enumerate(pieces_of(group, shard, start, end)):
        found += [*halves[0][rank].tolist(), *halves[1][rank].tolist()][: piece.size]
    return shard.new_tensor(found)


# expect: over budget: with the matrix at 18:33, rank 0 sent 156 bytes
def gathers_the_bucket(group, shard, start, end):
    return group.all_gather(shard, "bucket")[start:end]


# expect: fetch's result
def keeps_the_zeros(group, shard, start, end):
    own, contribution = own_piece(group, shard, start, end), shard.new_zeros(len(shard))
    contribution[: len(own)] = own
    return group.all_gather(contribution, "pieces")


# expect: rank 0 has element 13 of the bucket at index 0, not 18
def starts_every_piece_at_the_shard(group, shard, start, end):
    pieces = pieces_of(group, shard, start, end)
    longest = max(piece.size for piece in pieces)
    rows = group.all_gather(shard[:longest].clone(), "pieces").view(group.size, longest)
    return rows.new_tensor([x for row, piece in zip(rows, pieces, strict=True) for x in row[: piece.size]])


# expect: unequal pieces: ranks 0 to 3 hand over 0, 8, 7 and 0 elements, and an all-gather wants as many from each. Send
# Every rank sends its piece as long as it is.
def unequal_pieces(group, shard, start, end):
    return group.all_gather(own_piece(group, shard, start, end), "pieces")
