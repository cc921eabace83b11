# expect: with a matrix of 4 x 24, rank 0 has
# The product of the sum is not the sum of the products.
def gram(group, block):
    total = group.all_reduce(block.clone(), "sum")
    return total @ total.T, total.norm()
