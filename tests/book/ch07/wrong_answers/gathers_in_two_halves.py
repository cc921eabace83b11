# expect: over budget: with the matrix at 18:33, rank 0 made 2 collectives
from distmuon.sharding.layout import Range


def fetch(group, shard, start, end):
    size = len(shard)
    mine = Range(group.rank * size, (group.rank + 1) * size).intersect(Range(start, end)).relative_to(group.rank * size)
    half = -(-size // 2)
    padded = shard.new_zeros(2 * half)
    padded[: mine.size] = shard[mine.as_slice]
    halves = [group.all_gather(part.clone(), "half").view(group.size, half) for part in padded.split(half)]
    found = []
    for rank in range(group.size):
        piece = Range(rank * size, (rank + 1) * size).intersect(Range(start, end))
        found += [*halves[0][rank].tolist(), *halves[1][rank].tolist()][: piece.size]
    return shard.new_tensor(found)
