# expect: over budget: in case 1, rank 0 made 2 collectives, and one is enough for all matrices
# Chapter 7's answer, once for every matrix that is cut.
import torch

from distmuon.sharding.layout import Range


def gather_cut(group, shard, matrices):
    size, origin = len(shard), group.rank * len(shard)
    whole = {}
    for index, place in enumerate(matrices):
        pieces = [place.intersect(Range(rank * size, (rank + 1) * size)) for rank in range(group.size)]
        mine, longest = pieces[group.rank], max(piece.size for piece in pieces)
        if longest == place.size:  # one rank owns it whole
            if mine.size:
                whole[index] = shard[mine.relative_to(origin).as_slice]
            continue
        message = shard.new_zeros(longest)
        message[: mine.size] = shard[mine.relative_to(origin).as_slice]
        rows = group.all_gather(message, "pieces").view(group.size, longest)
        if mine.size:
            whole[index] = torch.cat([row[: piece.size] for row, piece in zip(rows, pieces, strict=True)])
    return whole
