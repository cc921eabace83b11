"""Wrong answers to the puzzle of chapter 17: above each stands what its reader must be told."""

import torch

from muonbook.ch17.puzzle import to_owners as right
from muonbook.ch17.puzzle import to_owners as together


# expect: a dict of those
def everything_everywhere(pieces, shapes, owners, dp):
    found = {}
    for i, (rows, columns) in enumerate(shapes):
        most = -(-rows // dp.size)
        padded = torch.zeros(most, columns)
        padded[: len(pieces[i])] = pieces[i]
        found[i] = dp.all_gather(padded.flatten(), "rows").view(-1, columns)[:rows]
    return found


# expect: is not the whole one
def in_the_order_of_ranks(pieces, shapes, owners, dp):
    return {i: whole.flip(0) for i, whole in right(pieces, shapes, owners, dp).items()}


# expect: one is enough for all matrices
def one_by_one(pieces, shapes, owners, dp):
    found = {}
    for i, owner in enumerate(owners):
        one = together(pieces[i : i + 1], shapes[i : i + 1], [owner], dp)
        if owner == dp.rank:
            found[i] = one[0]
    return found
