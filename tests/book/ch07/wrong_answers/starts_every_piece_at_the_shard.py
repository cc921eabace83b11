# expect: rank 0 has element 13 of the bucket at index 0, not 18
from distmuon.sharding.layout import Range


def fetch(group, shard, start, end):
    size = len(shard)
    pieces = [Range(rank * size, (rank + 1) * size).intersect(Range(start, end)) for rank in range(group.size)]
    longest = max(piece.size for piece in pieces)
    rows = group.all_gather(shard[:longest].clone(), "pieces").view(group.size, longest)
    return rows.new_empty(0).new_tensor([x for row, piece in zip(rows, pieces, strict=True) for x in row[: piece.size]])
