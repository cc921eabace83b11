# expect: over budget: with a matrix of 4 x 24, rank 0 made 2 collectives, and one is enough for both answers
def gram(group, block):
    squares = group.all_reduce(block.square().sum().reshape(1), "squares")
    return group.all_reduce(block @ block.T, "gram"), squares.sqrt().item()
