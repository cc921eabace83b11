# expect: rank 0: it passed on 3 elements while its left neighbour passed on 2: chunks must be alike
# tensor_split cuts 10 elements into 3 + 3 + 2 + 2.
import torch


def all_reduce(ring, x):
    n = ring.size
    chunks = list(x.tensor_split(n))
    for move in range(n - 1):
        outgoing, incoming = (ring.rank - move) % n, (ring.rank - move - 1) % n
        chunks[incoming] = chunks[incoming] + ring.pass_on(chunks[outgoing])
    for move in range(n - 1):
        outgoing, incoming = (ring.rank + 1 - move) % n, (ring.rank - move) % n
        chunks[incoming] = ring.pass_on(chunks[outgoing])
    return torch.cat(chunks)
