# expect: one is enough for all matrices
from muonbook.ch17.puzzle import to_owners as together


def to_owners(pieces, shapes, owners, dp):
    found = {}
    for i, owner in enumerate(owners):
        one = together(pieces[i : i + 1], shapes[i : i + 1], [owner], dp)
        if owner == dp.rank:
            found[i] = one[0]
    return found
