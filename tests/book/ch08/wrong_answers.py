"""Wrong answers to the puzzle of chapter 8: above each stands what its reader must be told."""

import torch

from distmuon.sharding.layout import Range
from muonbook.ch08.puzzle import cut_pieces
from muonbook.ch08.puzzle import gather_cut as right


# expect: in case 1, rank 0 returned matrix 2, of which it owns nothing: work for others
def everything_for_everyone(group, shard, matrices):
    bucket = group.all_gather(shard, "bucket")
    return {i: bucket[place.as_slice] for i, place in enumerate(matrices)}


# expect: in case 1, rank 0 owns a piece of matrix 0 and did not return it
# Only what travelled is returned: a matrix that was whole from the start is missing.
def forgets_what_it_owns_whole(group, shard, matrices):
    cut = {index for index, _ in cut_pieces(matrices, group.rank, len(shard))}
    return {index: matrix for index, matrix in right(group, shard, matrices).items() if index in cut}


# expect: over budget: in case 1, rank 0 made 2 collectives, and one is enough for all matrices
# Chapter 7's answer, once for every matrix that is cut.
def one_call_per_matrix(group, shard, matrices):
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


# expect: unequal pieces: ranks 0 to 3 hand over 8, 14, 5 and 0 elements, and an all-gather wants as many from each.
# Pieces are sent as long as they are, and an all-gather wants them equally long.
def own_length(group, shard, matrices):
    size, origin = len(shard), group.rank * len(shard)
    lists = [cut_pieces(matrices, rank, size) for rank in range(group.size)]
    if not any(lists):
        return {}
    own = [shard[piece.relative_to(origin).as_slice] for _, piece in lists[group.rank]]
    message = torch.cat([*own, shard.new_zeros(0)])
    group.all_gather(message, "cut pieces")
    return {}


# expect: ranks 0, 1 and 2 waited in vain for the others in skips_the_call.py, line ... rank 3 had already returned
# A rank that needs nothing goes home, and the others wait for it.
def skips_the_call(group, shard, matrices):
    mine = Range(group.rank * len(shard), (group.rank + 1) * len(shard))
    needed = [i for i, place in enumerate(matrices) if place.intersect(mine).size]
    if not needed:
        return {}
    bucket = group.all_gather(shard, "bucket")
    return {i: bucket[matrices[i].as_slice] for i in needed}


# expect: over budget: in case 1, rank 0 sent 240 bytes, and 168 are enough
# gather_all: right, and everything travels.
def whole_bucket(group, shard, matrices):
    mine = Range(group.rank * len(shard), (group.rank + 1) * len(shard))
    bucket = group.all_gather(shard, "bucket")
    return {i: bucket[place.as_slice] for i, place in enumerate(matrices) if place.intersect(mine).size}
