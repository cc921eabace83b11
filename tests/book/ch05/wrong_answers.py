"""Wrong answers to the puzzle of chapter 5: above each stands what its reader must be told."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def reduce_scatter(ring, chunks):
    for move in range(ring.size - 1):
        outgoing, incoming = (ring.rank - move) % ring.size, (ring.rank - move - 1) % ring.size
        chunks[incoming] = chunks[incoming] + ring.pass_on(chunks[outgoing])
    return chunks


def all_gather(ring, chunks):
    for move in range(ring.size - 1):
        outgoing, incoming = (ring.rank + 1 - move) % ring.size, (ring.rank - move) % ring.size
        chunks[incoming] = ring.pass_on(chunks[outgoing])
    return chunks


# expect: every rank: it asked torch.distributed for allreduce_; only ring.pass_on is allowed here
def around_the_ring(ring, x):
    dist.all_reduce(x)
    return x


# expect: with 8 elements, rank 0 has 0 at index 0, where the sum is 60
# Every rank ends with one finished chunk, and leaves the others as they came.
def no_all_gather(ring, x):
    width = -(-len(x) // ring.size)
    chunks = F.pad(x, (0, ring.size * width - len(x))).split(width)
    return torch.cat(reduce_scatter(ring, list(chunks)))[: len(x)]


# expect: every rank: RuntimeError: shape '[4, -1]' is invalid for input of size 10 (no_padding.py, line ...
# Fine as long as the ranks divide the length.
def no_padding(ring, x):
    return torch.cat(all_gather(ring, reduce_scatter(ring, list(x.view(ring.size, -1)))))


# expect: rank 0: it passed on 3 elements while its left neighbour passed on 2: chunks must be alike
# tensor_split cuts 10 elements into 3 + 3 + 2 + 2.
def uneven_chunks(ring, x):
    return torch.cat(all_gather(ring, reduce_scatter(ring, list(x.tensor_split(ring.size)))))


# expect: over budget: with 8 elements, rank 0 passed on 24, and 12 are enough
# Right sums, but whole vectors travel all the way around.
def whole_vectors(ring, x):
    total, travelling = x, x
    for _ in range(ring.size - 1):
        travelling = ring.pass_on(travelling)
        total = total + travelling
    return total
