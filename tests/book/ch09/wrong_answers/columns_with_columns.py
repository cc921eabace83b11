# expect: the Gram matrix has shape (6, 6), and (4, 4) is wanted
def gram(group, block):
    whole = group.all_reduce(block.T @ block, "gram")
    return whole, whole.trace().sqrt()
