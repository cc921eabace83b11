# expect: fetch's result
from distmuon.sharding.layout import Range


def fetch(group, shard, start, end):
    size = len(shard)
    mine = Range(group.rank * size, (group.rank + 1) * size).intersect(Range(start, end)).relative_to(group.rank * size)
    contribution = shard.new_zeros(size)
    contribution[: mine.size] = shard[mine.as_slice]
    return group.all_gather(contribution, "pieces")
