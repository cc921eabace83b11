# expect: a dict of those
import torch


def to_owners(pieces, shapes, owners, dp):
    found = {}
    for i, (rows, columns) in enumerate(shapes):
        most = -(-rows // dp.size)
        padded = torch.zeros(most, columns)
        padded[: len(pieces[i])] = pieces[i]
        found[i] = dp.all_gather(padded.flatten(), "rows").view(-1, columns)[:rows]
    return found
