# expect: is not the whole one
from muonbook.ch17.puzzle import to_owners as right


def to_owners(pieces, shapes, owners, dp):
    return {i: whole.flip(0) for i, whole in right(pieces, shapes, owners, dp).items()}
