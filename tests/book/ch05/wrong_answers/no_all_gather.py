# expect: with 8 elements, rank 0 has 0 at index 0, where the sum is 60
# Reduce-scatter alone: every rank ends with one finished chunk, and leaves the others as they came.
import torch
import torch.nn.functional as F


def all_reduce(ring, x):
    n = ring.size
    width = -(-len(x) // n)
    chunks = list(F.pad(x, (0, n * width - len(x))).split(width))
    for move in range(n - 1):
        outgoing, incoming = (ring.rank - move) % n, (ring.rank - move - 1) % n
        chunks[incoming] = chunks[incoming] + ring.pass_on(chunks[outgoing])
    return torch.cat(chunks)[: len(x)]
