# expect: over budget: with 8 elements, rank 0 passed on 24, and 12 are enough
# Right sums, but whole vectors travel all the way around.
def all_reduce(ring, x):
    total, travelling = x, x
    for _ in range(ring.size - 1):
        travelling = ring.pass_on(travelling)
        total = total + travelling
    return total
