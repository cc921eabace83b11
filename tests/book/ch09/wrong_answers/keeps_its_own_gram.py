# expect: with a matrix of 4 x 24, rank 0 has
# Block-wise: only the conversations inside this rank's columns.
def gram(group, block):
    own = block @ block.T
    return own, own.trace().sqrt()
