# expect: unequal pieces: ranks 0 to 3 hand over 0, 8, 7 and 0 elements, and an all-gather wants as many from each. Send
# Every rank sends its piece as long as it is.
from distmuon.sharding.layout import Range


def fetch(group, shard, start, end):
    size = len(shard)
    mine = Range(group.rank * size, (group.rank + 1) * size).intersect(Range(start, end)).relative_to(group.rank * size)
    return group.all_gather(shard[mine.as_slice], "pieces")
