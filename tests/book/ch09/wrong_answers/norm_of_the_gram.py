# expect: has norm
# The norm of X X^T is not the norm of X.
def gram(group, block):
    whole = group.all_reduce(block @ block.T, "gram")
    return whole, whole.norm().sqrt()
