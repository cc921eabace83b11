"""Wrong answers to the puzzle of chapter 9: above each stands what its reader must be told."""


# expect: over budget: with a matrix of 4 x 24, rank 0 made 2 collectives, and one is enough for both answers
def asks_twice_for_the_norm(group, block):
    squares = group.all_reduce(block.square().sum().reshape(1), "squares")
    return group.all_reduce(block @ block.T, "gram"), squares.sqrt().item()


# expect: the Gram matrix has shape (6, 6), and (4, 4) is wanted
def columns_with_columns(group, block):
    whole = group.all_reduce(block.T @ block, "gram")
    return whole, whole.trace().sqrt()


# expect: over budget: with a matrix of 4 x 24, rank 0 sent 288 bytes, and 96 are enough
# Right, and the whole matrix travels.
def gathers_the_columns(group, block):
    whole = group.all_gather_blocks(block, 1, "whole")
    return whole @ whole.T, whole.norm()


# expect: with a matrix of 4 x 24, rank 0 has
# Block-wise: only the conversations inside this rank's columns.
def keeps_its_own_gram(group, block):
    own = block @ block.T
    return own, own.trace().sqrt()


# expect: has norm
# The norm of X X^T is not the norm of X.
def norm_of_the_gram(group, block):
    whole = group.all_reduce(block @ block.T, "gram")
    return whole, whole.norm().sqrt()


# expect: with a matrix of 4 x 24, rank 0 has
# The product of the sum is not the sum of the products.
def sums_blocks_first(group, block):
    total = group.all_reduce(block.clone(), "sum")
    return total @ total.T, total.norm()
