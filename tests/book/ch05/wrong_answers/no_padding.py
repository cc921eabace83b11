# expect: every rank: RuntimeError: shape '[4, -1]' is invalid for input of size 10 (no_padding.py, line 5)
# Fine as long as the ranks divide the length.
def all_reduce(ring, x):
    n = ring.size
    chunks = list(x.view(n, -1))
    for move in range(n - 1):
        outgoing, incoming = (ring.rank - move) % n, (ring.rank - move - 1) % n
        chunks[incoming] = chunks[incoming] + ring.pass_on(chunks[outgoing])
    for move in range(n - 1):
        outgoing, incoming = (ring.rank + 1 - move) % n, (ring.rank - move) % n
        chunks[incoming] = ring.pass_on(chunks[outgoing])
    return x.new_tensor([float(value) for chunk in chunks for value in chunk])
