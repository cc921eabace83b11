# expect: times the right sum of squares


def global_norm(grid, pieces):
    squares = sum(gradient.double().square().sum() for gradient, tp_split_dim in pieces)
    return grid.world.all_reduce(squares, "squares").sqrt().item()
